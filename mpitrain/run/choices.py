"""The keys that name a row of a table: their allowed names, and the check of a configuration."""

from __future__ import annotations  # help() prints signatures as they are written here.

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpitrain.collectives.selection import table as algorithm_table
from mpitrain.config import Config, check_choice
from mpitrain.config import keys as keys_of_sections
from mpitrain.config import parse as parse_sections
from mpitrain.config.plugins import load
from mpitrain.config.whole import Key
from mpitrain.optim import RULES
from mpitrain.parallel.modes import MODES, STREAMS, ZERO, refusal_of
from mpitrain.pipeline.schedules import SCHEDULES


def choices() -> dict[str, tuple[Any, ...]]:
    """Return {key: allowed names} for the keys that name a row of a table."""
    return {
        "optimizer.name": (*RULES,),
        "replication.mode": (*MODES,),
        "replication.zero": (0, *ZERO),
        "replication.algorithm": algorithm_table.choices("allreduce"),
        "layout.algorithm": algorithm_table.choices("allreduce"),
    }


def keys() -> Iterator[Key]:
    """Iterate over all configuration keys, with the names and the help of the rows that they
    name.
    """
    names = choices()
    rows = {
        "replication.mode": ". ".join(f"{name}: {mode.help}" for name, mode in MODES.items()),
        "replication.zero": ", ".join(f"{stage} {mode.help}" for stage, mode in ZERO.items()),
        "pipeline.schedule": ", ".join(SCHEDULES),
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


def parse(tables: Mapping[str, Any], path: Path | None = None) -> Config:
    """Make a `Config` of tables such as {"run": {"steps": 100}}.

    The plugins of run.plugins are imported first. Tables without model.kind get the kind that fits
    data.source.

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
        One error that lists all invalid keys and values; else one about keys that exclude each
        other.
    """
    return without_plugins(load(tables), path)


def without_plugins(tables: Mapping[str, Any], path: Path | None = None) -> Config:
    """Make a `Config` as `parse`, but import no plugins: the tables may be another person's."""
    config = parse_sections(tables, path, choices())
    _check_rules(config)
    return config


def check(config: Config) -> None:
    """Raise ConfigError for a name that is not in its table, or a key that its row refuses."""
    load(config.model_dump())
    values = config.flat()
    for key, names in choices().items():
        check_choice(key, values[key], names)
    _check_rules(config)


def _check_rules(config: Config) -> None:
    if refusal := refusal_of(config):
        raise refusal
