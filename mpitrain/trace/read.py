"""The reader of trace files, in any state that a rank left them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mpitrain.errors import ConfigError
from mpitrain.files import contents
from mpitrain.strict_json import complaint, parsed
from mpitrain.trace.ring_buffer import HEAD, KINDS, MAGIC, NUMBERS, PACE, PHASES, RECORD

MOST = 1 << 16
"""Largest number of ranks; a damaged head may contain any number."""
LATEST = 1e12
"""Largest time of a clock, in seconds; a record with a later time is damaged."""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Facts(BaseModel):
    """The entries of a trace's head whose types are checked. All are optional; a head may have
    others.
    """

    model_config = ConfigDict(strict=True)

    rank: Count = 0
    ranks: Annotated[int, Field(ge=1, le=MOST)] = 1
    host: str = ""
    run: str | None = None
    place: dict[Literal["dp", "tp", "pp"], Count] | None = None
    parts: dict[Annotated[str, Field(pattern=r"\A(0|[1-9][0-9]{0,8})\z")], list[str]] = {}
    peak_activation_bytes: Count = 0
    released_bytes: Count = 0


class Trace(NamedTuple):
    """Trace of one rank.

    facts    about the rank: its number, host, coordinates, chunks, ...
    names    (name, ranks that it concerns), by number
    records  from the oldest to the newest, with fields as in RECORD
    clocks   (time of this rank's clock, seconds to add to get the clock of rank 0)
    """

    facts: dict[str, Any]
    names: list[tuple[str, Sequence[int]]]
    records: np.ndarray
    clocks: tuple[tuple[float, float], ...] = ()


_Time = Annotated[float, Field(strict=True, ge=-LATEST, le=LATEST)]
_CLOCK = TypeAdapter(Annotated[list[_Time], Field(min_length=2, max_length=2)])


def read_trace(path: Path) -> Trace:
    """Read the trace of a rank, whether or not the rank finished.

    raises   ConfigError if the file is not a trace of this version, or is damaged
    """
    try:
        data = contents(path, inner=2)
    except OSError as error:
        raise ConfigError(
            f"The trace {path} cannot be read: {error.strerror}.", "Let this user read it."
        ) from None
    if not data.startswith(MAGIC):
        if data.startswith(MAGIC[: MAGIC.rindex(b" ")]):
            raise ConfigError(
                f"{path} is a trace of another version of mpitrain.",
                "Report with the version that wrote it.",
            )
        raise ConfigError(f"{path} is no trace.", "Name the directory of a run.")
    facts, names, clocks = _head(data[len(MAGIC) : HEAD - PACE.size])
    if (len(data) - HEAD) / RECORD.itemsize != facts.get("records"):
        raise ConfigError(
            f"The trace {path} has {len(data):,} bytes, not as many as it was made with.",
            "Copy it again.",
        )
    try:
        _Facts.model_validate(facts)
    except ValidationError as error:
        raise ConfigError(
            f"The trace {path} is damaged: {complaint(error)}.", "Copy it again."
        ) from None
    records = np.frombuffer(data, RECORD, offset=HEAD)
    is_good = (
        (records["number"] > 0) & (records["what"] < len(names)) & (records["kind"] < len(KINDS))
    )
    is_good &= (
        (records["phase"] < len(PHASES))
        & np.isfinite(records["start"])
        & np.isfinite(records["end"])
    )
    is_good &= (records["end"] == 0) | (records["end"] >= records["start"])
    is_good &= (
        (records["start"] >= -LATEST) & (records["start"] <= LATEST) & (records["end"] <= LATEST)
    )
    return Trace(facts, names, _in_order(records[is_good]), tuple(clocks))


def _in_order(records: np.ndarray) -> np.ndarray:
    """Return the records in the order in which they began; their numbers may begin again at 0."""
    numbers = records["number"].astype(np.int64)
    if len(numbers) and np.ptp(numbers) > NUMBERS // 2:
        numbers[numbers < NUMBERS // 2] += NUMBERS
    return records[np.argsort(numbers, kind="stable")]


def _head(
    text: bytes,
) -> tuple[dict[str, Any], list[tuple[str, Sequence[int]]], list[tuple[float, float]]]:
    """Reading stops at the first invalid line, as a rank leaves that was killed while it wrote."""
    facts: dict[str, Any] = {}
    names, clocks = list[tuple[str, Sequence[int]]](), list[tuple[float, float]]()
    for line in text.rstrip(b"\0").split(b"\n"):
        try:
            entry = parsed(line)
            if isinstance(entry, dict):
                if "clock" in entry:
                    time, offset = _CLOCK.validate_python(entry.pop("clock"))
                    clocks.append((time, offset))
                facts |= entry
            else:
                what, ranks = entry
                among = range(*ranks) if isinstance(ranks, list) else tuple(map(int, ranks.split()))
                if among and not 0 <= min(among[0], among[-1]) <= max(among[0], among[-1]) < MOST:
                    break
                names.append((str(what), among))
        except (ValueError, TypeError, AttributeError, OverflowError):
            break
    return facts, names, clocks
