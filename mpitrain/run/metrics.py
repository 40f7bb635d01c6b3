"""The metrics file of a run, metrics.jsonl: one strict JSON object per line."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from mpitrain.errors import say
from mpitrain.files import append, appending, contents, reading_of, write_whole
from mpitrain.strict_json import once, refuse_constant

METRICS = "metrics.jsonl"
"""The name of the file in a run directory."""

LAST = 2**63 - 1
"""Upper bound of the step number in a metrics record."""

LARGEST = 1e300
"""Largest number that is shown: a file may have an integer that no float represents."""

CLOSING = ("end", "stopped", "failed")
"""The events that end a run, and so its metrics file."""


def strict(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record as valid JSON: a number that is not finite is None, and `nonfinite` True."""
    clean = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
    }
    return (
        {**clean, "nonfinite": True}
        if any(v is None and record[k] is not None for k, v in clean.items())
        else clean
    )


def series(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record with a step by name; NaN for one that was not finite."""
    if "event" in record or "step" not in record:
        return {}
    return {
        name: math.nan if value is None else float(value)
        for name, value in record.items()
        if name != "step" and (value is None or is_number(value))
    }


Row = Mapping[str, Any]
"""{name of a column: value}; run and step are always there."""


def joined(run: str, records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of a run by step; training and evaluation of a step are one row.

    Of a series that both have, such as wall_s, the value of training is used.
    """
    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        if values := series(record):
            step = int(record["step"])
            rows[step] = values | rows.get(step, {}) | {"run": run, "step": step}
    return [rows[step] for step in sorted(rows)]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and -LARGEST < value < LARGEST


class MetricsFile:
    """Appends records; each line is passed to the system before the next one begins.

    written  bytes of the file, and their CRC-32
    """

    def __init__(self, path: Path):
        self._path = path
        self._open()

    def _open(self) -> None:
        self._descriptor = appending(self._path)
        data = contents(self._path)
        if data and not data.endswith(b"\n"):  # It was cut within a line.
            append(self._descriptor, b"\n")
            data += b"\n"
        self.written = summed(data)

    def write(self, record: dict[str, Any]) -> None:
        if not self._is_ours():
            say(
                f"warning: {self._path} was changed, cut or removed by another program; the run goes on, and this file lacks "
                "what is gone."
            )
            before = self._descriptor
            self._open()
            os.close(before)
        line = (json.dumps(strict(record), allow_nan=False) + "\n").encode()
        append(self._descriptor, line)
        nbytes, crc = self.written
        self.written = nbytes + len(line), crc32(line, crc)

    def _is_ours(self) -> bool:
        """Return whether the path still leads to the file that was opened, with the bytes that were written."""
        file = os.fstat(self._descriptor)
        try:
            place = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(file, place) and file.st_size == self.written[0]

    def close(self) -> None:
        os.close(self._descriptor)


def summed(data: bytes) -> tuple[int, int]:
    """Return the number of some bytes, and their CRC-32."""
    return len(data), crc32(data)


def check_kept(path: Path, written: Sequence[int], step: int) -> None:
    """Warn if a file of metrics has lost or changed lines from before the checkpoint of a step.

    written  bytes of the file at that time, and their CRC-32; empty: not known
    """
    if not written:
        return
    try:
        kept = contents(path)[: written[0]]
    except OSError:
        kept = b""
    if summed(kept) != tuple(written):
        left = sum("val_loss" in record for _, record in _lines(path))
        say(
            f"warning: {path} is not as it was at step {step}: it was changed, cut or removed. The best evaluation, run.patience "
            f"and the times of the run begin with what is left of it, {left} evaluation(s)."
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file without invalid lines; [] if there is no file.

    raises  ConfigError if the path is not a regular file or cannot be read
    """
    way_out = "Name the directory of a run, and let this user read it."
    with reading_of(f"The metrics {path}", way_out):
        return [record for _, record in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over the valid lines and their records; only a newline ends a line."""
    try:
        lines = contents(path).split(b"\n")
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
    """Drop the lines after `step` and the closing line, which the resumed run writes again."""
    stay = [line + "\n" for line, record in _lines(path) if _stays(record, step)]
    write_whole(path, "".join(stay))


def _stays(record: Mapping[str, Any], step: int) -> bool:
    return record.get("step", 0) <= step and record.get("event") not in CLOSING


def ended_at(records: Sequence[Mapping[str, Any]]) -> float:
    """Return the time of the last record in seconds since 1970; 0 if no start has noted its time."""
    began = [seconds(r, "time") - seconds(r, "wall_s") for r in records if seconds(r, "time")]
    return began[-1] + seconds(records[-1], "wall_s") if began else 0.0


def total_s(records: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds from the beginning of a run to the last record, the times between its starts included."""
    if not (ended := ended_at(records)):
        return 0.0
    first = next(record for record in records if seconds(record, "time"))
    return ended - seconds(first, "time") + sum(seconds(first, key) for key in BEFORE)


def seconds(record: Mapping[str, Any], key: str) -> float:
    """Return a number of a record; 0 if the record lacks it."""
    return float(record[key]) if is_number(record.get(key)) else 0.0


BEFORE = ("startup_s", "waited_s", "repeated_s")
"""The keys of a start's record with the seconds since the line before that counts."""


class Best(NamedTuple):
    """The best evaluation of a run: the first one with the lowest validation loss.

    step   -1: there was none
    since  number of evaluations after it
    """

    loss: float = math.inf
    step: int = -1
    since: int = 0

    def after(self, loss: float, step: int) -> "Best":
        """Return the best one after one more evaluation; a loss that is not finite is never better."""
        return Best(loss, step) if loss < self.loss else self._replace(since=self.since + 1)


class ResumeInfo(NamedTuple):
    """The facts about the earlier part of a run that a resumed run continues from.

    wall_s        wall-clock time of the earlier part, in seconds
    is_evaluated  whether the step of the checkpoint was evaluated
    skipped       number of updates that were skipped or undone
    in_a_row      number of consecutive such steps that end at the checkpoint
    checkpoint_s  longest time to publish a checkpoint, in seconds; 0 if there was none
    best          the fields of the `Best` evaluation
    ended         the time of the last line of all, in seconds since 1970; 0: unknown
    repeated_s    seconds from the last line that counts to the last line of all: their steps are repeated
    """

    wall_s: float = 0.0
    is_evaluated: bool = False
    skipped: int = 0
    in_a_row: int = 0
    checkpoint_s: float = 0.0
    best: Sequence[Any] = Best()
    ended: float = 0.0
    repeated_s: float = 0.0


def past(folder: Path, step: int) -> ResumeInfo:
    """Return the facts about the run in this directory, which resumes after `step`."""
    every = read_metrics(folder / METRICS)
    records = [record for record in every if _stays(record, step)]
    ended, repeated_s = ended_at(every), total_s(every) - total_s(records)

    def longest(key: str) -> float:
        return max((seconds(record, key) for record in records), default=0.0)

    skipped = {record.get("step") for record in records if record.get("skipped") is True}
    in_a_row = next(count for count in range(len(skipped) + 1) if step - count not in skipped)
    is_evaluated = any("val_loss" in record and record.get("step") == step for record in records)
    best = Best()
    for record in records:
        if "val_loss" in record:
            loss = record["val_loss"]
            best = best.after(loss if is_number(loss) else math.inf, record.get("step", 0))
    undone = [record["undone"] for record in records if is_number(record.get("undone"))]
    known = best if best.step >= 0 else ()  # JSON has no infinity.
    return ResumeInfo(
        longest("wall_s"),
        is_evaluated,
        len(skipped) + int(sum(undone)),
        in_a_row,
        longest("checkpoint_s"),
        known,
        ended,
        max(0.0, repeated_s),
    )
