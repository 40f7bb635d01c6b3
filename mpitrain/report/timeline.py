"""The traces of all ranks of a run as one timeline, on the clock of rank 0."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.run.folder import TRACE
from mpitrain.trace.ring import PHASES, RECEIVE, SEND, STEP, Trace, read_trace


class Timeline(NamedTuple):
    """What the ranks of a run noted, by rank, in seconds of the clock of rank 0."""

    traces: Sequence[Trace]

    def steps(self) -> range:
        """The newest steps that every rank has finished and has in its trace; without the first of them, which may allocate."""
        common: set[int] = set.intersection(*({
            int(record["step"]) for record in trace.records if record["kind"] == STEP and record["end"]}
            for trace in self.traces))
        if not common:
            return range(0)
        last = first = max(common)
        while first - 1 in common:
            first -= 1
        return range(min(first + 1, last), last + 1)

    def window(self, rank: int, steps: range) -> tuple[float, float]:
        """From when to when a rank was at these steps, and at what lay between them."""
        records = self.traces[rank].records
        mine = records[(records["kind"] == STEP) & (records["step"] >= steps.start) & (records["step"] < steps.stop)]
        return float(mine["start"].min()), float(mine["end"].max())

    def end(self) -> float:
        """When a rank gave the last sign of life."""
        return max(last_sign(trace) for trace in self.traces)


def within(trace: Trace, steps: range) -> np.ndarray:
    """What a rank began during these steps, which it has all finished; not what it did between them, such as an evaluation."""
    records = trace.records
    spans = records[(records["kind"] == STEP) & (records["step"] >= steps.start) & (records["step"] < steps.stop)]
    at = np.searchsorted(spans["start"], records["start"], side="right") - 1
    return records[(at >= 0) & (records["start"] <= spans["end"][at])]


def read_timeline(folder: Path) -> Timeline:
    """The traces of a run directory; ConfigError if there is none, or one cannot be read."""
    files = sorted((folder / TRACE).glob("rank-*"))
    if not files:
        raise ConfigError(f"There is no trace of a run in {folder}.",
                          "Name the directory of a run that was trained with run.trace, which is the default.")
    traces = sorted((_on_one_clock(read_trace(file)) for file in files), key=lambda trace: trace.facts["rank"])
    if [trace.facts["rank"] for trace in traces] != list(range(traces[0].facts["ranks"])):
        raise ConfigError(f"{folder / TRACE} has the traces of {len(traces)} ranks, but the run had {traces[0].facts['ranks']}.",
                          "Look for the others on the hosts of the run: every rank writes its own.")
    return Timeline(traces)


def _on_one_clock(trace: Trace) -> Trace:
    records = trace.records.copy()
    records["start"] += trace.facts["offset"]
    records["end"][records["end"] > 0] += trace.facts["offset"]
    return trace._replace(records=records)


def last_sign(trace: Trace) -> float:
    """When a rank began or ended something last."""
    return float(max(trace.records["start"].max(initial=0), trace.records["end"].max(initial=0)))


def told(trace: Trace, record: Any) -> str:
    """A record in words."""
    what, _ = trace.names[record["what"]]
    phase = PHASES[record["phase"]]
    said = f"{phase} of {what}" if phase else what or f"message of tag {record['tag']}"
    if record["kind"] in (SEND, RECEIVE):
        way = "send to" if record["kind"] == SEND else "receive from"
        peer = f"rank {record['peer']}" if record["peer"] >= 0 else "any rank"
        said = f"{way} {peer}: {said}, {record['nbytes']:,} bytes"
    return said + (f", micro-batch {record['micro']}" if record["micro"] >= 0 else "")


def is_open(records: np.ndarray) -> np.ndarray:
    """Which records have begun and not ended."""
    return records["end"] == 0
