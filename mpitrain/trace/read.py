"""What a rank noted, read from its file, in whatever state the rank left it."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.files import contents
from mpitrain.trace.ring import HEAD, KINDS, MAGIC, PHASES, RECORD

MOST = 1 << 20
"""Ranks that one name can concern: a head that was damaged may say any number."""


class Trace(NamedTuple):
    """What one rank noted: facts, (what, ranks that it concerns) by number, records from the oldest to the newest.

    clocks  (times, seconds to add to them), by which times of this rank become those of rank 0's clock
    """

    facts: dict[str, Any]
    names: list[tuple[str, tuple[int, ...]]]
    records: np.ndarray
    clocks: tuple[tuple[float, float], ...] = ()


def read_trace(path: Path) -> Trace:
    """Read the trace of a rank, whatever became of it; ConfigError if the file is none."""
    try:
        data = contents(path, inner=2)
    except OSError as error:
        raise ConfigError(f"The trace {path} cannot be read: {error.strerror}.", "Let this user read it.") from None
    if not data.startswith(MAGIC):
        if data.startswith(MAGIC[:MAGIC.rindex(b" ")]):
            raise ConfigError(f"{path} is a trace of another version of mpitrain.", "Report with the version that wrote it.")
        raise ConfigError(f"{path} is no trace.", "Name the directory of a run.")
    facts, names, clocks = _head(data[len(MAGIC):HEAD])
    if (len(data) - HEAD) / RECORD.itemsize != facts.get("records"):
        raise ConfigError(f"The trace {path} has {len(data):,} bytes, not as many as it was made with.", "Copy it again.")
    records = np.frombuffer(data, RECORD, offset=HEAD)
    is_good = (records["number"] > 0) & (records["what"] < len(names)) & (records["kind"] < len(KINDS))
    is_good &= (records["phase"] < len(PHASES)) & np.isfinite(records["start"]) & np.isfinite(records["end"])
    is_good &= (records["end"] == 0) | (records["end"] >= records["start"])
    return Trace(facts, names, np.sort(records[is_good], order="number"), tuple(clocks))


def _head(text: bytes) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...]]], list[tuple[float, float]]]:
    """Facts, names and clocks, up to the first line that is none of them: the last of a rank that was killed while it wrote."""
    facts: dict[str, Any] = {}
    names, clocks = [], []
    for line in text.rstrip(b"\0").split(b"\n"):
        try:
            found = json.loads(line)
            if isinstance(found, dict):
                if "clock" in found:
                    time, offset = map(float, found.pop("clock"))
                    if not math.isfinite(time + offset):
                        break
                    clocks.append((time, offset))
                facts |= found
            else:
                what, ranks = found
                names.append((str(what), tuple(range(*ranks)[:MOST] if isinstance(ranks, list) else map(int, ranks.split()))))
        except (ValueError, TypeError, AttributeError, RecursionError):
            break
    return facts, names, clocks
