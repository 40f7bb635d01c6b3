"""The trace files of a run, in any state that its ranks left them, as one timeline on the clock of rank 0."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mpitrain.errors import ConfigError
from mpitrain.files import contents, reading_of
from mpitrain.strict_json import complaint, parsed
from mpitrain.trace.recorder import (
    COMPUTE,
    DEVICE,
    HEAD,
    KINDS,
    MAGIC,
    NUMBERS,
    PACE,
    PHASES,
    RECEIVE,
    RECORD,
    SEND,
    STEP,
)

MOST = 1 << 16
"""Largest number of ranks; a damaged head may contain any number."""
LATEST = 1e12
"""Largest time of a clock, in seconds; a record with a later time is damaged."""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Facts(BaseModel):
    """The entries of a trace's head whose types are checked; a head may lack them, and have others."""

    model_config = ConfigDict(strict=True)

    rank: Count = 0
    number: Count | None = None
    ranks: Annotated[int, Field(ge=1, le=MOST)] = 1
    host: str = ""
    run: str | None = None
    place: dict[Literal["dp", "cp", "tp", "pp"], Count] | None = None
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

    @property
    def rank_name(self) -> str:
        """The rank, and the process at the start that has become it after a loss, if that is another one."""
        rank, number = self.facts["rank"], self.facts.get("number")
        return f"rank {rank}" + (
            "" if number in (None, rank) else f" (process {number} of the start)"
        )


_Time = Annotated[float, Field(strict=True, ge=-LATEST, le=LATEST)]
_CLOCK = TypeAdapter(Annotated[list[_Time], Field(min_length=2, max_length=2)])


def read_trace(path: Path) -> Trace:
    """Read the trace of a rank, whether or not the rank finished.

    raises   ConfigError if the file is not a trace of this version, or is damaged
    """
    with reading_of(f"The trace {path}", "Let this user read it."):
        data = contents(path)
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
    start, end = records["start"], records["end"]
    is_good = (
        (records["number"] > 0)
        & (records["what"] < len(names))
        & (records["kind"] < len(KINDS))
        & (records["phase"] < len(PHASES))
        & (np.abs(start) <= LATEST)
        & ((end == 0) | ((end >= start) & (end <= LATEST)))
    )
    records = records[is_good]
    # The order in which they began; their numbers may begin again at 0.
    numbers = records["number"].astype(np.int64)
    if len(numbers) and np.ptp(numbers) > NUMBERS // 2:
        numbers[numbers < NUMBERS // 2] += NUMBERS
    return Trace(facts, names, records[np.argsort(numbers, kind="stable")], tuple(clocks))


def _head(
    text: bytes,
) -> tuple[dict[str, Any], list[tuple[str, Sequence[int]]], list[tuple[float, float]]]:
    """Return facts, names and clocks from the lines of a head, up to the first invalid line.

    A rank that was killed while it wrote a line leaves an invalid one.
    """
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


TRACE = "trace"
"""The folder of a run directory that contains the traces."""


class Timeline(NamedTuple):
    """Timeline of a run: the trace of each rank, in seconds of the clock of rank 0.

    traces   by rank; if a trace is missing, indices are not the numbers of ranks
    missing  {rank: reason for which its trace is missing}
    """

    traces: Sequence[Trace]
    missing: Mapping[int, str] = {}

    def steps(self) -> range:
        """Return the newest steps that every rank has finished and has in its trace.

        If there are several, the first is left out, because it may allocate memory. The range is
        empty if a trace is missing, since other ranks waited for that rank.
        """
        if self.missing or not self.traces:
            return range(0)
        common = set.intersection(*map(_finished, self.traces))
        if not common:
            return range(0)
        last = first = max(common)
        while first - 1 in common:
            first -= 1
        return range(min(first + 1, last), last + 1)

    def workers(self) -> list[int]:
        """Return the ranks that compute rows: all but parameter servers.

        Parameter servers have no grid coordinates.
        """
        placed = [rank for rank, trace in enumerate(self.traces) if trace.facts.get("place")]
        return placed or list(range(len(self.traces)))

    def window(self, rank: int, steps: range) -> tuple[float, float]:
        """Return when a rank began the first of these steps, and when it ended the last."""
        spans = _spans(self.traces[rank], steps)
        return float(spans["start"].min()), float(spans["end"].max())

    def end(self) -> float:
        """Return the time of the last record of any rank."""
        return max(map(last_sign, self.traces), default=0.0)


def _finished(trace: Trace) -> set[int]:
    """Return the numbers of the steps that a rank has finished and has in its trace."""
    spans = trace.records[(trace.records["kind"] == STEP) & (trace.records["end"] > 0)]
    return set(spans["step"].tolist())


def _spans(trace: Trace, steps: range) -> np.ndarray:
    """Return the records of these steps themselves."""
    spans = trace.records[trace.records["kind"] == STEP]
    return spans[(spans["step"] >= steps.start) & (spans["step"] < steps.stop)]


def named_steps(steps: range) -> str:
    """Return steps as text, counted from 1."""
    return f"step {steps.stop}" if len(steps) == 1 else f"steps {steps.start + 1} to {steps.stop}"


def within(trace: Trace, steps: range, records: np.ndarray | None = None) -> np.ndarray:
    """Return the records that a rank began during these steps.

    Records between steps are left out, for example those of an evaluation.

    steps    steps that the rank has finished
    records  the records to choose from; None: all of the trace
    """
    records, spans = trace.records if records is None else records, _spans(trace, steps)
    at = np.searchsorted(spans["start"], records["start"], side="right") - 1
    return records[(at >= 0) & (records["start"] <= spans["end"][at])]


def computed(trace: Trace) -> np.ndarray:
    """Return the compute records of a rank: those of its device, or of its host without one."""
    on_device = trace.records[(trace.records["kind"] == DEVICE) & (trace.records["end"] > 0)]
    return on_device if len(on_device) else trace.records[trace.records["kind"] == COMPUTE]


def read_timeline(folder: Path) -> Timeline:
    """Read the traces of a run or of a failed start; see `trace_files`. Unreadable ones are missing.

    raises  ConfigError if there is no trace
    """
    traces: dict[int, Trace] = {}
    missing: dict[int, str] = {}
    where, files = trace_files(folder)
    for file in files:
        rank = int(digits) if (digits := file.name.removeprefix("rank-")).isdecimal() else -1
        try:
            traces[rank] = _checked(read_trace(file), rank, file)
        except ConfigError as error:
            missing[rank] = error.law
    if not traces and not missing:
        raise ConfigError(
            f"There is no trace of a run in {folder}.",
            "Name the directory of a run that was trained with run.trace, which is the default.",
        )
    runs = {rank: (each.facts.get("run"), each.facts["ranks"]) for rank, each in traces.items()}
    most = Counter(runs.values()).most_common(1)[0][0] if runs else (None, 0)
    for rank, run in runs.items():
        if run != most:
            size = f", of {run[1]} ranks" if run[1] != most[1] else ""
            name = where / trace_file(folder, rank).name
            missing[rank] = f"The trace {name} is of another run{size}."
            del traces[rank]
    for rank in {*range(most[1])} - traces.keys():
        law = f"There is no trace of rank {rank} in {where}; every rank writes its own."
        missing.setdefault(rank, law)
    ordered = [_on_one_clock(traces[rank]) for rank in sorted(traces)]
    return Timeline(ordered, dict(sorted(missing.items())))


def trace_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's trace in a run directory."""
    return folder / TRACE / f"rank-{rank:05d}"


def trace_files(folder: Path) -> tuple[Path, list[Path]]:
    """Return the directory of a run's traces, and the files in it.

    folder  run directory, or directory with the traces of a failed start
    raises  ConfigError if the folder cannot be read
    """
    try:
        traces = folder / TRACE if TRACE in os.listdir(folder) else folder
        names = sorted(os.listdir(traces))
        return traces, [traces / name for name in names if name.startswith("rank-")]
    except OSError as error:
        raise ConfigError(
            f"There is no trace of a run in {error.filename}: {error.strerror}.",
            "Name the directory of a run.",
        ) from None


def _checked(trace: Trace, rank: int, file: Path) -> Trace:
    """Return the trace; raise ConfigError unless its header names this rank and is complete.

    `_Facts` has checked the types of what the header has.
    """
    facts, place = trace.facts, trace.facts.setdefault("place", None)
    if (
        facts.get("rank") != rank
        or not rank < facts.get("ranks", 0) < MOST
        or "host" not in facts
        or (place is not None and not {"dp", "tp", "pp"} <= place.keys())
    ):
        raise ConfigError(
            f"The trace {file} does not say of what rank it is.", "Copy it again, whole."
        )
    return trace


def _on_one_clock(trace: Trace) -> Trace:
    records, has_ended = trace.records.copy(), trace.records["end"] > 0
    records["start"] = on_the_clock_of_rank_0(records["start"], trace.clocks)
    records["end"][has_ended] = on_the_clock_of_rank_0(records["end"][has_ended], trace.clocks)
    return trace._replace(records=records)


def on_the_clock_of_rank_0(times: np.ndarray, clocks: Sequence[tuple[float, float]]) -> np.ndarray:
    """Convert a rank's times to the clock of rank 0.

    The offset is interpolated linearly between comparisons of the clocks. Outside, it drifts at the
    mean rate from the first comparison to the last.

    clocks  for each comparison: (time of the rank's clock, seconds to add)
    """
    if not clocks:
        return times
    at, behind = np.array(sorted(clocks)).T
    inside = np.clip(times, at[0], at[-1])
    drift = (behind[-1] - behind[0]) / (at[-1] - at[0]) if at[-1] > at[0] else 0.0
    return times + np.interp(inside, at, behind) + drift * (times - inside)


def last_sign(trace: Trace) -> float:
    """Return the last time at which a rank began or ended a record."""
    return float(max(trace.records["start"].max(initial=0), trace.records["end"].max(initial=0)))


def described(trace: Trace, record: Any) -> str:
    what, _ = trace.names[record["what"]]
    phase = PHASES[record["phase"]]
    text = (
        f"{phase} of {what}"
        if phase
        else what or (f"message of tag {record['tag']}" if record["tag"] >= 0 else "a message")
    )
    if record["kind"] in (SEND, RECEIVE):
        direction = "send to" if record["kind"] == SEND else "receive from"
        peer = f"rank {record['peer']}" if record["peer"] >= 0 else "any rank"
        text = f"{direction} {peer}: {text}, {record['nbytes']:,} bytes"
    return text + (f", micro-batch {record['micro']}" if record["micro"] >= 0 else "")


def is_open(records: np.ndarray) -> np.ndarray:
    """Return which records have begun and not ended."""
    return records["end"] == 0
