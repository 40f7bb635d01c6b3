"""The tuning file: the cost constants that `bench fit` measured on this machine, as JSON."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mpitrain.collectives.selection.cost_model import (
    KNOTS,
    LEVELS,
    MEMORY,
    TERMS,
    Constants,
    Level,
    Tuning,
)
from mpitrain.errors import ConfigError
from mpitrain.files import reading_of, text_of, write_whole
from mpitrain.strict_json import validated

MOST_RANKS = 10**6
SLOWEST = 1e3
"""Upper bound of a constant in a tuning file, in seconds per message, byte or run."""

Seconds = Annotated[float, Field(ge=0, le=SLOWEST)]
Ranks = Annotated[str, Field(pattern=r"\A[1-9][0-9]{0,5}\z")]
Knot = Annotated[str, Field(pattern=r"\A[1-9][0-9]{0,18}\z")]
Size = Annotated[int, Field(ge=1, le=MOST_RANKS)]
LevelName = Annotated[str, Field(pattern=rf"\A({'|'.join(LEVELS)})\z")]
Table = dict[Knot, list[Seconds]]


class _Machine(BaseModel):
    """Machine that a tuning describes; further entries are information for people."""

    model_config = ConfigDict(strict=True, extra="allow")

    hosts: Size
    cores: Size
    sockets: Size = 1


class _Level(BaseModel):
    """Schema of a level; `Level` documents both entries."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    plans: dict[Ranks, dict[str, Table]]
    whole: dict[Ranks, dict[str, dict[str, Table]]]


class _TuningFile(BaseModel):
    """Schema of a tuning file; `Tuning` documents each entry.

    Files of earlier versions have the entries of one level beside `machine`.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    machine: _Machine
    levels: dict[LevelName, _Level] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _of_one_level(cls, file: Any) -> Any:
        match file:
            case {"machine": {"hosts": int(hosts)}, "plans": plans, "whole": whole, **rest}:
                level = {"plans": plans, "whole": whole}
                name = "network" if hosts > 1 else "host"
                return {"machine": file["machine"], "levels": {name: level}} | (
                    {key: value for key, value in rest.items() if key != "machine"}
                )
        return file


def read_tuning(path: Path) -> Tuning:
    """Read a tuning file; ConfigError if it is not a valid one."""
    with reading_of(f"The tuning file {path}", "mpitrain bench fit writes one."):
        data = text_of(path)
    try:
        file = validated(_TuningFile, data)
    except ValueError as error:
        raise ConfigError(
            f"{path} is no tuning file: {error}.", "mpitrain bench fit writes one."
        ) from None
    tuning = Tuning(
        file.machine.model_dump(exclude_unset=True),
        {name: _level(level) for name, level in file.levels.items()},
    )
    if not all(map(_is_complete, tuning.levels.values())):
        raise ConfigError(
            f"{path} is a tuning file of another version of mpitrain.",
            "Delete it and measure again: mpitrain bench fit.",
        )
    if any(
        not any(values)
        for level in tuning.levels.values()
        for memories in level.plans.values()
        for at in memories.values()
        for values in at.values()
    ):
        raise ConfigError(
            f"{path} is no tuning file: messages that take no time at all were never measured.",
            "mpitrain bench fit writes one.",
        )
    return tuning


def _level(file: _Level) -> Level:
    return Level(
        {
            int(n): {memory: _constants(at) for memory, at in memories.items()}
            for n, memories in file.plans.items()
        },
        {
            int(n): {
                memory: {name: _constants(at) for name, at in names.items()}
                for memory, names in memories.items()
            }
            for n, memories in file.whole.items()
        },
    )


def _constants(by_knot: dict[str, list[float]]) -> Constants:
    """Return constants by knot; those of a single knot, which people write, hold for all of them."""
    sizes = dict.fromkeys(KNOTS, by_knot.popitem()[1]) if len(by_knot) == 1 else by_knot
    return {int(knot): tuple(values) for knot, values in sizes.items()}


def _is_complete(level: Level) -> bool:
    """Return whether a level has every entry that `predict` reads."""
    plans, whole = level
    tables = [(at, len(TERMS)) for memories in plans.values() for at in memories.values()]
    tables += [
        (at, 2)
        for memories in whole.values()
        for names in memories.values()
        for at in names.values()
    ]
    return (
        len(plans) > 0
        and all("plain" in memories and {*memories} <= {*MEMORY} for memories in plans.values())
        and {n: set(memories) for n, memories in plans.items()}
        == {n: set(memories) for n, memories in whole.items()}
        and all(
            set(at) == set(KNOTS) and {len(values) for values in at.values()} == {length}
            for at, length in tables
        )
    )


def tuning_text(tuning: Tuning) -> str:
    """Return the text of the tuning file, with one line for the constants of each knot."""
    levels = {name: level._asdict() for name, level in tuning.levels.items()}
    text = json.dumps({"machine": tuning.machine, "levels": levels}, indent=1, allow_nan=False)
    return re.sub(r"\[[^]]*]", lambda numbers: " ".join(numbers[0].split()), text) + "\n"


def write_tuning(path: Path, tuning: Tuning) -> None:
    write_whole(path, tuning_text(tuning))


def foreign(tuning: Tuning, hosts: Sequence[str]) -> str:
    """Return one line of advice if a job on several hosts uses a tuning of a single host, else "".

    hosts  the host name of each rank
    """
    if len(set(hosts)) == 1 or "network" in tuning.levels:
        return ""
    return (
        f"No network measurements: algorithm auto guesses. Run `mpitrain launch -n {len(hosts)} -- bench fit` on these "
        f"{len(set(hosts))} hosts, and name its file"
    )


DEFAULT = read_tuning(Path(__file__).with_name("default.json"))
"""Constants for machines without a tuning file.

They were measured with 2 and with 4 ranks on 2 cores of a server of 2023. Links between hosts are
assumed to have 30 us and 1 GB/s.
"""
