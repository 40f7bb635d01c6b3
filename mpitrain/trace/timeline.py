"""The traces of all ranks of a run as one timeline, on the clock of rank 0."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.files import opened
from mpitrain.trace.read import MOST, Trace, read_trace
from mpitrain.trace.ring_buffer import COMPUTE, DEVICE, PHASES, RECEIVE, SEND, STEP

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
        common: set[int] = set.intersection(
            *(
                {
                    int(record["step"])
                    for record in trace.records
                    if record["kind"] == STEP and record["end"]
                }
                for trace in self.traces
            )
        )
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
        records = self.traces[rank].records
        of_steps = records[
            (records["kind"] == STEP)
            & (records["step"] >= steps.start)
            & (records["step"] < steps.stop)
        ]
        return float(of_steps["start"].min()), float(of_steps["end"].max())

    def end(self) -> float:
        """Return the time of the last record of any rank."""
        return max((last_sign(trace) for trace in self.traces), default=0.0)


def named_steps(steps: range) -> str:
    """Return steps as text, counted from 1."""
    return f"step {steps.stop}" if len(steps) == 1 else f"steps {steps.start + 1} to {steps.stop}"


def within(trace: Trace, steps: range, records: np.ndarray | None = None) -> np.ndarray:
    """Return the records that a rank began during these steps.

    The rank must have finished the steps. Records between steps are left out, for example those of
    an evaluation.

    records  records to choose from; None: all records of the trace
    """
    records, steps_of = (
        trace.records if records is None else records,
        trace.records[trace.records["kind"] == STEP],
    )
    spans = steps_of[(steps_of["step"] >= steps.start) & (steps_of["step"] < steps.stop)]
    at = np.searchsorted(spans["start"], records["start"], side="right") - 1
    return records[(at >= 0) & (records["start"] <= spans["end"][at])]


def computed(trace: Trace) -> np.ndarray:
    """Return the compute records of a rank: those of its device, or of its host without one."""
    on_device = trace.records[(trace.records["kind"] == DEVICE) & (trace.records["end"] > 0)]
    return on_device if len(on_device) else trace.records[trace.records["kind"] == COMPUTE]


def read_timeline(folder: Path) -> Timeline:
    """Read the traces in a run directory, or those of a failed start, which has no run directory.

    Unreadable traces are listed as missing.

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
    whose = Counter((trace.facts.get("run"), trace.facts["ranks"]) for trace in traces.values())
    for rank, trace in list(traces.items()):
        if (run := (trace.facts.get("run"), trace.facts["ranks"])) != (
            most := whose.most_common(1)[0][0]
        ):
            missing[rank] = (
                f"The trace {where / trace_file(folder, rank).name} is of another run{_unlike(run, most)}."
            )
            del traces[rank]
    for rank in range(max((trace.facts["ranks"] for trace in traces.values()), default=0)):
        if rank not in traces:
            missing.setdefault(
                rank, f"There is no trace of rank {rank} in {where}; every rank writes its own."
            )
    return Timeline(
        [_on_one_clock(traces[rank]) for rank in sorted(traces)], dict(sorted(missing.items()))
    )


def trace_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's trace in a run directory."""
    return folder / TRACE / f"rank-{rank:05d}"


def trace_files(folder: Path) -> tuple[Path, list[Path]]:
    """Return the directory of a run's traces, and the files in it.

    folder  run directory, or directory with the traces of a failed start
    raises  ConfigError if the folder cannot be read or its traces are a link
    """
    try:
        with opened(folder) as run:
            if run.facts(TRACE) is None:
                return folder, [folder / name for name in run.names() if name.startswith("rank-")]
            with run.subdirectory(TRACE) as traces:
                return traces.path, [
                    traces.path / name for name in traces.names() if name.startswith("rank-")
                ]
    except OSError as error:
        raise ConfigError(
            f"There is no trace of a run in {error.filename}: {error.strerror}.",
            "Name the directory of a run.",
        ) from None


def _unlike(run: tuple[Any, int], most: tuple[Any, int]) -> str:
    """Return ", of N ranks" for the first trace, or "" if both runs have equally many ranks.

    run, most  (identifier of the run, its number of ranks)
    """
    return f", of {run[1]} ranks" if run[1] != most[1] else ""


def _checked(trace: Trace, rank: int, file: Path) -> Trace:
    """Return the trace; raise ConfigError unless its header names this rank and is complete."""
    facts, place = trace.facts, trace.facts.setdefault("place", None)
    is_placed = place is None or (
        isinstance(place, dict) and all(type(place.get(axis)) is int for axis in ("dp", "tp", "pp"))
    )
    if (
        facts.get("rank") != rank
        or type(facts.get("ranks")) is not int
        or not rank < facts["ranks"] < MOST
        or not is_placed
        or not isinstance(facts.get("host"), str)
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
