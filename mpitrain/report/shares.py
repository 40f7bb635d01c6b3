"""Where the time of each rank went: computing, and standing still for one of three reasons.

A wait for several ranks counts as waiting until the last of them came to it, and as communication from then on. A wait for one
rank counts as waiting until that rank began its end of the message: between stages of a pipeline that is the bubble.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mpitrain.pipeline.instructions import ACTIVATION, GRADIENT
from mpitrain.report.timeline import Timeline
from mpitrain.trace.ring import COMPUTE, PAUSE, RECEIVE, SEND, STEP, WAIT, Trace

SHARES = ("computing", "exposed communication", "bubble", "waiting for another rank", "evaluation, checkpoint", "in between")
COMPUTING, COMMUNICATION, BUBBLE, WAITING, PAUSES, BETWEEN = range(len(SHARES))


class Shares(NamedTuple):
    """Seconds of some steps, what lay between them included.

    steps      their numbers, from 0
    seconds    (ranks, shares), which sum to the time that each rank was at these steps
    waited     (ranks, ranks): how long each rank stood still because of each
    """

    steps: range
    seconds: np.ndarray
    waited: np.ndarray

    @property
    def of_all(self) -> np.ndarray:
        """The share of each of SHARES in the time of all ranks: they sum to 1."""
        return self.seconds.sum(0) / self.seconds.sum()

    @property
    def slowest(self) -> int | None:
        """The rank that the others waited for longest; None if they waited for none."""
        sums = self.waited.sum(0)
        return int(sums.argmax()) if sums.any() else None


def shares(timeline: Timeline) -> Shares | None:
    """Where the time of the steps went that all ranks have; None if there are none."""
    steps, ranks = timeline.steps(), len(timeline.traces)
    if not steps:
        return None
    ready = _Ready(timeline, steps)
    seconds, waited = np.zeros((ranks, len(SHARES))), np.zeros((ranks, ranks))
    for rank, trace in enumerate(timeline.traces):
        start, stop = timeline.window(rank, steps)
        seconds[rank, BETWEEN] = stop - start
        for record, own, is_paused in _own_times(trace.records, start, stop):
            seconds[rank, BETWEEN] -= own
            if is_paused:
                seconds[rank, PAUSES] += own
            elif record["kind"] == COMPUTE:
                seconds[rank, COMPUTING] += own
            elif record["kind"] == WAIT:
                other, when = ready.of(rank, record)
                still = 0.0 if other == rank else min(max(when - record["start"], 0.0), own)
                waited[rank, other] += still
                is_bubble = trace.names[record["what"]][0] in (ACTIVATION, GRADIENT)
                seconds[rank, BUBBLE if is_bubble else WAITING] += still
                seconds[rank, COMMUNICATION] += own - still
            else:
                seconds[rank, BETWEEN] += own
    return Shares(steps, seconds, waited)


def _own_times(records: np.ndarray, start: float, stop: float) -> Iterator[tuple[Any, float, bool]]:
    """What the rank's own thread did in [start, stop]: (record, seconds without what is nested in it, whether in a pause)."""
    mine = records[np.isin(records["kind"], (STEP, COMPUTE, WAIT, PAUSE)) & (records["end"] > start) & (records["start"] < stop)]
    mine = mine[np.argsort(mine["number"])]    # a span is noted before those within it
    around: list[list[Any]] = []    # of spans that last: [record, seconds of its own, whether in a pause]
    for record in mine:
        while around and around[-1][0]["end"] <= record["start"]:
            yield tuple(around.pop())
        if around:
            around[-1][1] -= min(record["end"], stop) - max(record["start"], start)
        is_paused = record["kind"] == PAUSE or bool(around and around[-1][2])
        around.append([record, min(record["end"], stop) - max(record["start"], start), is_paused])
    for rest in reversed(around):
        yield tuple(rest)


class _Ready:
    """When those came for whom a rank waited."""

    def __init__(self, timeline: Timeline, steps: range):
        self._keys: dict[tuple[int, int], Hashable] = {}    # by rank and number of a wait or message
        self._comes: dict[Hashable, list[tuple[float, int]]] = defaultdict(list)
        for rank, trace in enumerate(timeline.traces):
            counts: dict[Hashable, int] = defaultdict(int)
            for record in trace.records[np.isin(trace.records["kind"], (WAIT, SEND, RECEIVE))]:
                key = self._key(rank, trace, record)
                if key is not None and record["step"] in steps:
                    counts[key] += 1
                    place = key, counts[key]
                    self._keys[rank, int(record["number"])] = place
                    self._comes[place].append((float(record["start"]), rank))

    @staticmethod
    def _key(rank: int, trace: Trace, record: Any) -> Hashable:
        """Equal for waits of several ranks together, and different for the ends of one message."""
        what, ranks = trace.names[record["what"]]
        if record["kind"] == WAIT:
            return ("wait", int(record["step"]), what, ranks) if record["peer"] < 0 and len(ranks) > 1 else None
        ends = (rank, int(record["peer"])) if record["kind"] == SEND else (int(record["peer"]), rank)
        return "message", int(record["step"]), what, int(record["tag"]), ends, int(record["kind"])

    def of(self, rank: int, wait: Any) -> tuple[int, float]:
        """The rank that was waited for last, and when it came; this one, if nobody can tell."""
        if wait["peer"] < 0:
            comes = self._comes.get(self._keys.get((rank, int(wait["number"]))), [])
            when, last = max(comes, default=(0.0, rank))
            return last, when
        mine: Any = self._keys.get((rank, int(wait["nbytes"])))
        if mine is None:
            return rank, 0.0
        (*end, kind), count = mine
        when, last = max(self._comes.get(((*end, SEND + RECEIVE - kind), count), []), default=(0.0, rank))
        return last, when
