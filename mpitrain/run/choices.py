"""`parse`, and the keys whose values name a row of a table: the names they allow, checks, help."""

from __future__ import annotations  # help() prints signatures as they are written here.

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpitrain.collectives.selection import table as algorithm_table
from mpitrain.collectives.selection.algorithm import is_file
from mpitrain.config import ALL_LINEAR, Config, ConfigKey, Optimizer, check_choice
from mpitrain.config import keys as keys_of_sections
from mpitrain.config import parse as parse_sections
from mpitrain.config.plugins import MARK, load
from mpitrain.data import names as names_of_sources
from mpitrain.data import source_kind, spellings, token_files, validating
from mpitrain.layers.plain import LOSSES
from mpitrain.models.table import MODELS, kinds
from mpitrain.optim import RULES
from mpitrain.optim.optimizer import EVERY
from mpitrain.parallel.modes import MODES, STREAMS, ZERO
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.run.rules import check as check_rules
from mpitrain.run.rules import check_each, of_optimizer

ALGORITHMS = ("replication.algorithm", "layout.algorithm")


def choices() -> dict[str, tuple[Any, ...]]:
    """Return {key: allowed names} for the keys that name a row of a table."""
    return {
        "model.kind": (*MODELS,),
        "model.loss": (*LOSSES,),
        "optimizer.name": (*RULES,),
        "replication.mode": (*MODES,),
        "replication.zero": (0, *ZERO),
        "replication.algorithm": algorithm_table.choices("allreduce"),
        "layout.algorithm": algorithm_table.choices("allreduce"),
    }


def keys() -> Iterator[ConfigKey]:
    """Iterate over all configuration keys; range and help list the rows that a key can name."""
    names = choices()
    rows = {
        "data.source": names_of_sources(with_help=True),
        "data.validation": validating(),
        "data.vocabulary": token_files(),
        "data.dtype": token_files(),
        "data.order": spellings("order"),
        "data.separator": spellings("separator"),
        "data.template": spellings("template"),
        "data.tokenizer": spellings("tokenizer"),
        "data.packing": spellings("packing"),
        "data.attend": spellings("attend"),
        "data.mixture": spellings("order"),
        "data.normalise": spellings("normalise"),
        "data.classes": spellings("classes"),
        "data.labels": spellings("labels"),
        "data.mask": " or ".join(kinds(lambda row: row.hides)),
        "run.sample": " or ".join(kinds(lambda row: row.writes)),
        "model.kind": ", ".join(f"{kind} {row.help}" for kind, row in MODELS.items()),
        "model.loss": ", ".join(f"{name}: {row.help}" for name, row in LOSSES.items()),
        "model.layers": _phrases("model.layers", ", or of "),
        "model.width": _phrases("model.width", ", or "),
        "model.dropout": _phrases("model.dropout", ", or "),
        "pipeline.partition": _phrases("pipeline.partition", " "),
        "replication.mode": ". ".join(f"{name}: {mode.help}" for name, mode in MODES.items()),
        "replication.zero": ", ".join(f"{stage} {mode.help}" for stage, mode in ZERO.items()),
        "pipeline.schedule": ", ".join(SCHEDULES),
        "optimizer.name": ". ".join(
            f"{name}{_in_brackets(rule.defaults)}: {rule.help}" for name, rule in RULES.items()
        ),
    }
    rows |= {
        f"optimizer.{key}": ", ".join(name for name, rule in RULES.items() if key in rule.reads)
        for key in Optimizer.model_fields
        if key not in EVERY
    }
    streams = ". ".join(
        [
            f"{' and '.join(STREAMS)} have no flush, and each stage updates its own parameters",
            *(f"{name} {mode.help}" for name, mode in STREAMS.items()),
        ]
    )
    for key in keys_of_sections():
        yield key._replace(
            range=" | ".join(map(str, names.get(key.name, ()))) or key.range,
            help=key.help.format(rows=rows.get(key.name), streams=streams),
        )


def _in_brackets(defaults: Mapping[str, float]) -> str:
    text = ", ".join(f"{key} {value:g}" for key, value in defaults.items())
    return f" ({text})" if text else ""


def _phrases(key: str, between: str) -> str:
    phrases = [row.phrases[key] for row in MODELS.values() if key in row.phrases]
    return between.join(dict.fromkeys(phrases))


def parse(tables: Mapping[str, Any], path: Path | None = None) -> Config:
    """Make a `Config` of tables such as {"run": {"steps": 100}}, or of {"run.steps": 100}, as in TOML.

    The plugins of run.plugins are imported first. Tables without model.kind get the kind that fits
    data.source. Keys that are not set come from the folder of run.init_from.

    Parameters
    ----------
    tables : mapping
        Values by section and key.
    path : Path, optional
        The file that the tables were read from, for messages.

    Returns
    -------
    Config

    Raises
    ------
    ConfigError
        One error that lists all invalid keys and values; without any, one about keys that
        exclude each other.
    """
    config = without_plugins(_with_own_algorithms(load(_nested(tables))), path)
    check_each(of_optimizer(config), path)
    return config.as_checked()


def _nested(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tables with the value of a dotted key in the table of its section."""
    nested = {name: dict(t) if isinstance(t, Mapping) else t for name, t in tables.items()}
    for name in tables:
        section, dot, key = str(name).partition(".")
        if dot and isinstance(table := nested.setdefault(section, {}), dict):
            table[key] = nested.pop(name)
    return nested


def without_plugins(tables: Mapping[str, Any], path: Path | None = None) -> Config:
    """Make a `Config` of the tables of a run, which may be another person's: import no plugins.

    Runs of earlier versions may break rules of optimizers, which `parse` checks.
    """
    names = choices()
    for key in ALGORITHMS:
        value = _text_of(tables, key)
        if MARK in value and is_file(value):
            names[key] = (*names[key], value)
    if _text_of(tables, "run.init_from") or _text_of(tables, "lora.init_from"):
        from mpitrain.run.model_keys import with_keys_of_folder

        tables = with_keys_of_folder(tables)
    config = _with_linear(parse_sections(_with_kind(tables), path, names))
    check_rules(config, path)
    return config


def _with_own_algorithms(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add all-reduces of the user's files to `ALL_REDUCE`, and their digests to the keys."""
    for key in ALGORITHMS:
        if is_file(value := _text_of(tables, key)):
            from mpitrain.collectives.selection.own_algorithm import file_algorithm

            section, name = key.split(".")
            tables = {**tables, section: {**tables[section], name: file_algorithm(value)}}
    return tables


def _text_of(tables: Mapping[str, Any], key: str) -> str:
    """Return the value of a key in unchecked tables; empty if it is not set, or is no text."""
    section, name = key.split(".")
    table = tables.get(section)
    value = table.get(name) if isinstance(table, Mapping) else None
    return value if isinstance(value, str) else ""


def _with_kind(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the kind of the first model that takes the data, to tables without model.kind."""
    data, model = tables.get("data", {}), tables.get("model", {})
    source = data.get("source") if isinstance(data, Mapping) else None
    if not isinstance(source, str) or not isinstance(model, Mapping) or "kind" in model:
        return tables
    fitting = kinds(lambda row: source_kind(source).form in row.takes.split())
    return {**tables, "model": {**model, "kind": fitting[0]}} if fitting else tables


def _with_linear(config: Config) -> Config:
    """Replace all-linear in lora.targets by the names of the layers, where the kind of model has such names."""
    names, targets = MODELS[config.model.kind].linear, config.lora.targets
    if not names or ALL_LINEAR not in targets:
        return config
    others = [name for name in targets if name != ALL_LINEAR and name not in names]
    return config.changed({"lora.targets": [*names, *others]})


def check(config: Config) -> None:
    """Raise ConfigError for a name of no row, or for keys that exclude each other."""
    load(config.model_dump())
    values = config.flat()
    for key, names in choices().items():
        check_choice(key, values[key], names)
    check_rules(config)
    check_each(of_optimizer(config))
