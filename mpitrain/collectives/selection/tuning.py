"""The tuning file: the cost constants that `bench fit` measured on this machine, as JSON."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mpitrain.collectives.selection.cost_model import KNOTS, MEMORY, TERMS, Constants, Tuning
from mpitrain.errors import ConfigError
from mpitrain.files import contents, write_whole
from mpitrain.strict_json import validated

MOST_RANKS = 10**6
SLOWEST = 1e3
"""Upper bound of a constant in a tuning file, in seconds per message, byte or run."""

Seconds = Annotated[float, Field(ge=0, le=SLOWEST)]
Ranks = Annotated[str, Field(pattern=r"\A[1-9][0-9]{0,5}\z")]
Knot = Annotated[str, Field(pattern=r"\A[1-9][0-9]{0,18}\z")]
Size = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Table = dict[Knot, list[Seconds]]


class _Machine(BaseModel):
    """Machine that a tuning describes; further entries are information for people."""

    model_config = ConfigDict(strict=True, extra="allow")

    hosts: Size
    cores: Size


class _TuningFile(BaseModel):
    """Schema of a tuning file; `Tuning` documents each entry."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    machine: _Machine
    plans: dict[Ranks, dict[str, Table]]
    whole: dict[Ranks, dict[str, dict[str, Table]]]


def read_tuning(path: Path) -> Tuning:
    """Read a tuning file; ConfigError if it is not a valid one."""
    try:
        file = validated(_TuningFile, contents(path))
    except OSError as error:
        raise ConfigError(
            f"The tuning file {path} cannot be read: {error.strerror}.",
            "mpitrain bench fit writes one.",
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is no tuning file: {error}.", "mpitrain bench fit writes one."
        ) from None
    tuning = Tuning(
        file.machine.model_dump(),
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
    if not _is_complete(tuning):
        raise ConfigError(
            f"{path} is a tuning file of another version of mpitrain.",
            "Delete it and measure again: mpitrain bench fit.",
        )
    if any(
        not any(values)
        for memories in tuning.plans.values()
        for at in memories.values()
        for values in at.values()
    ):
        raise ConfigError(
            f"{path} is no tuning file: messages that take no time at all were never measured.",
            "mpitrain bench fit writes one.",
        )
    return tuning


def _constants(by_knot: dict[str, list[float]]) -> Constants:
    return {int(knot): tuple(values) for knot, values in by_knot.items()}


def _is_complete(tuning: Tuning) -> bool:
    """Return whether the tuning has every entry that `predict` reads."""
    plans, whole = tuning.plans, tuning.whole
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
    text = json.dumps(tuning._asdict(), indent=1, allow_nan=False)
    return re.sub(r"\[[^]]*]", lambda numbers: " ".join(numbers[0].split()), text) + "\n"


def write_tuning(path: Path, tuning: Tuning) -> None:
    write_whole(path, tuning_text(tuning))


def foreign(tuning: Tuning, hosts: Sequence[str]) -> str:
    """Return one line of advice if a job on several hosts uses a tuning of a single host, else "".

    hosts  the host name of each rank
    """
    if len(set(hosts)) == 1 or tuning.machine["hosts"] > 1:
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
