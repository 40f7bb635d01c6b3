"""The metrics file of a run, metrics.jsonl: one strict JSON object per line."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.files import append, contents, opened, write_whole
from mpitrain.strict_json import once, refuse_constant

LAST = 2**63 - 1
"""Upper bound of the step number in a metrics record."""

LARGEST = 1e300
"""Largest number that is shown: a file may have an integer that no float represents."""

CLOSING = ("end", "stopped", "failed")
"""The events that end a run, and so its metrics file."""


def strict(record: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the record that is valid JSON: NaN and infinities become None.

    If there are any, `nonfinite` is True in the copy.
    """
    clean = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
    }
    return (
        {**clean, "nonfinite": True}
        if any(v is None and record[k] is not None for k, v in clean.items())
        else clean
    )


def series(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by their names; NaN for one that was not finite.

    Empty for an event, such as a start, and for a record without a step.
    """
    if "event" in record or "step" not in record:
        return {}
    return {
        name: math.nan if value is None else float(value)
        for name, value in record.items()
        if name != "step" and (value is None or is_number(value))
    }


def is_number(value: Any) -> bool:
    """Return whether the value is a number that a float represents."""
    return isinstance(value, int | float) and -LARGEST < value < LARGEST


class MetricsFile:
    """A writer that appends records to a metrics file.

    Each line is passed to the system completely before the next one begins.
    """

    def __init__(self, path: Path):
        with opened(path.parent) as folder:
            self._descriptor = folder.append(path.name)

    def write(self, record: dict[str, Any]) -> None:
        """Append a line, or nothing: see `append`."""
        line = json.dumps(strict(record), allow_nan=False) + "\n"
        append(self._descriptor, line.encode())

    def close(self) -> None:
        """Close the file. All lines are written already, so a full disk cannot make this fail."""
        os.close(self._descriptor)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file; [] if there is no file.

    Invalid lines are skipped. A killed run may have left one that is cut short.

    raises  ConfigError if the path is not a regular file or cannot be read
    """
    try:
        return [record for _, record in _lines(path)]
    except OSError as error:
        raise ConfigError(
            f"The metrics {path} cannot be read: {error.strerror}.",
            "Name the directory of a run, and let this user read it.",
        ) from None


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over the valid lines and their records; invalid lines are skipped.

    Only a newline ends a line, not the other line separators of str.splitlines.
    """
    try:
        lines = contents(path, inner=1).split(b"\n")
    except FileNotFoundError:
        return
    for raw in lines:
        try:
            line = raw.decode().strip()
            record = json.loads(line, parse_constant=refuse_constant, object_pairs_hook=once)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(record, dict)
            and type(step := record.get("step", 0)) in (int, float)
            and 0 <= step <= LAST
        ):
            yield line, record


def cut_after(path: Path, step: int) -> None:
    """Drop the lines of later steps than `step`, and the closing line, before a run resumes.

    The resumed run writes them again. All other lines stay as they are.
    """

    def stays(record: dict[str, Any]) -> bool:
        return record.get("step", 0) <= step and record.get("event") not in CLOSING

    write_whole(path, "".join(line + "\n" for line, record in _lines(path) if stays(record)))
