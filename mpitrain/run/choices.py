"""`parse` and the keys whose values name entries of tables: their choices, checks and help."""

from __future__ import annotations  # help() prints signatures as they are written here.

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain import config as configuration
from mpitrain.collectives.selection import table as algorithm_table
from mpitrain.config import Config, Key, check_choice, refusal
from mpitrain.data import TENTH, names, source_kind, token_files
from mpitrain.models.table import MODELS, check_model, kinds


def parse(tables: Mapping[str, Any], path: Path | None = None) -> Config:
    """Make a `Config` of tables such as {"run": {"steps": 100}}.

    Tables without model.kind get the kind that fits data.source.

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
        One error that lists all invalid keys and values.
    """
    config = configuration.parse(_with_kind(tables), path)
    check_names(config, path)
    return config


def _with_kind(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the kind of the first model that takes the data, to tables without model.kind."""
    data, model = tables.get("data", {}), tables.get("model", {})
    source = data.get("source") if isinstance(data, Mapping) else None
    if not isinstance(source, str) or not isinstance(model, Mapping) or "kind" in model:
        return tables
    fitting = kinds(lambda row: row.takes == source_kind(source).form)
    return {**tables, "model": {**model, "kind": fitting[0]}} if fitting else tables


def choices() -> dict[str, tuple[str, ...]]:
    """Return {key: allowed names} for the keys that name an entry of a table."""
    algorithms = algorithm_table.choices("allreduce")
    return {
        "model.kind": tuple(MODELS),
        "replication.algorithm": algorithms,
        "layout.algorithm": algorithms,
    }


def check_names(config: Config, path: Path | None = None) -> None:
    """Raise ConfigError for a name that is not in its table, or breaks the rules of its row.

    path  the file that the configuration was read from, for messages
    """
    values = config.flat()
    for key, known in choices().items():
        check_choice(key, values[key], known, path)
    validation = config.data.validation
    if validation not in ("", TENTH) and not source_kind(validation).is_token_file:
        raise refusal(
            f"data.validation must be {token_files()} or tenth, or empty, but is {validation!r}.",
            path,
        )
    check_model(config)


def help_of(key: Key) -> str:
    """Return the help of a key, with the words of the tables that its values name."""
    phrases = {
        "data.source": names(with_help=True),
        "data.validation": token_files(),
        "data.vocabulary": token_files(),
        "run.sample": " or ".join(kinds(lambda row: row.writes)),
        "model.kind": ", ".join(f"{kind} {row.help}" for kind, row in MODELS.items()),
        "model.layers": _phrases("model.layers", ", or of "),
        "model.width": _phrases("model.width", ", or "),
        "pipeline.partition": _phrases("pipeline.partition", " "),
    }
    return key.help.format(phrases.get(key.name))


def _phrases(key: str, between: str) -> str:
    return between.join(row.phrases[key] for row in MODELS.values() if key in row.phrases)
