"""metrics.jsonl: strict JSON, one object per line."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.files import contents, opened, write_whole
from mpitrain.strict_json import once

LAST = 2**63 - 1
"""The largest step that there can be."""

CLOSING = ("end", "stopped", "failed")  # events of a last line


def strict(record: dict[str, Any]) -> dict[str, Any]:
    """The record with every non-finite number as None and `nonfinite` set if there was one: JSON has no NaN."""
    clean = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
    }
    return (
        {**clean, "nonfinite": True}
        if any(v is None and record[k] is not None for k, v in clean.items())
        else clean
    )


class MetricsFile:
    """Appends records to a file, each line complete on disk's side of the process before the next."""

    def __init__(self, path: Path):
        with opened(path.parent) as folder:
            self._descriptor = folder.append(path.name)
        self._nbytes = os.fstat(self._descriptor).st_size

    def write(self, record: dict[str, Any]) -> None:
        """Append a line; OSError if it cannot be written, and then the file ends with the line before it."""
        rest = (json.dumps(strict(record), allow_nan=False) + "\n").encode()
        nbytes = self._nbytes + len(rest)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._nbytes)
            raise
        self._nbytes = nbytes

    def close(self) -> None:
        """Close the file; nothing is left to write, so that this cannot fail for want of room."""
        os.close(self._descriptor)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; lines that are none, such as one cut short by a killed run, are left out.

    raises  ConfigError if there is something that is no regular file, or that cannot be read
    """
    try:
        return [record for _, record in _lines(path)]
    except OSError as error:
        raise ConfigError(
            f"The metrics {path} cannot be read: {error.strerror}.",
            "Name the directory of a run, and let this user read it.",
        ) from None


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line that holds a record, and the record. Lines end at line breaks alone, and nothing else in a file is an error."""
    try:
        lines = contents(path, inner=1).split(b"\n")
    except FileNotFoundError:
        return
    for raw in lines:
        try:
            line = raw.decode().strip()
            record = json.loads(line, parse_constant=_refuse, object_pairs_hook=once)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(record, dict)
            and type(step := record.get("step", 0)) in (int, float)
            and 0 <= step <= LAST
        ):
            yield line, record


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")


def cut_after(path: Path, step: int) -> None:
    """Drop the lines that a run will write again when it resumes after `step`, and its closing line; others stay as they are."""

    def stays(record: dict[str, Any]) -> bool:
        return record.get("step", 0) <= step and record.get("event") not in CLOSING

    write_whole(path, "".join(line + "\n" for line, record in _lines(path) if stays(record)))
