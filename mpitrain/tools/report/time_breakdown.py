"""Breakdown of each rank's time: compute, exposed communication, and waiting by reason.

In a collective, a rank waits until the last rank arrives; from then on it communicates. A rank that
waits for a message waits until the other rank begins to send or receive it. Between stages of a
pipeline this waiting is the bubble. If the awaited rank itself waits at that time, the rank that it
waits for is blamed. While a rank's GPU computes, the rank counts as computing.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.pipeline.schedules import ACTIVATION, GRADIENT
from mpitrain.trace.recorder import COMPUTE, DEVICE, PAUSE, RECEIVE, ROWS, SEND, WAIT
from mpitrain.trace.timeline import Timeline, Trace

SHARES = (
    "computing",
    "exposed communication",
    "bubble",
    "waiting for another rank",
    "waiting for its rows",
    "evaluation, checkpoint",
    "in between",
)
COMPUTING, COMMUNICATION, BUBBLE, WAITING, READING, PAUSES, BETWEEN = range(len(SHARES))


class TimeShares(NamedTuple):
    """How the ranks spent their time in some steps, and between them.

    steps      numbers of the steps, from 0
    seconds    (ranks, len(SHARES)); a row sums to the time that the rank spent in these steps
    waited     (ranks, ranks): seconds that each rank (row) waited because of each rank (column)
    workers    the ranks that compute gradients. Parameter servers are not among them: an idle
               server delays no rank
    """

    steps: range
    seconds: np.ndarray
    waited: np.ndarray
    workers: Sequence[int]

    @property
    def waits(self) -> np.ndarray:
        """By rank: the seconds that workers waited because of it, servers included."""
        return self.waited[self.workers].sum(0)

    @property
    def slowest(self) -> int | None:
        """The rank because of which workers waited longest; None if they did not wait."""
        return int(self.waits.argmax()) if self.waits.any() else None


def shares(timeline: Timeline) -> TimeShares | None:
    """Break down the steps that all ranks have; None without steps or without time."""
    steps, ranks = timeline.steps(), len(timeline.traces)
    if not steps:
        return None
    ready, seconds = Arrivals(timeline, steps), np.zeros((ranks, len(SHARES)))
    stood: list[list[Still]] = [[] for _ in range(ranks)]
    for rank, trace in enumerate(timeline.traces):
        start, stop = timeline.window(rank, steps)
        busy, spent = _busy(trace.records), seconds[rank]
        spent[COMPUTING] = busy(start, stop)
        for record, own, is_paused in _own_times(trace.records, start, stop):
            idle = [(end - begin) - busy(begin, end) for begin, end in own]
            if is_paused:
                spent[PAUSES] += sum(end - begin for begin, end in own)
                spent[COMPUTING] -= sum(busy(begin, end) for begin, end in own)
            elif record["kind"] == COMPUTE:
                is_read = trace.names[record["what"]][0] == ROWS
                spent[READING if is_read else COMPUTING] += sum(idle)
            elif record["kind"] == WAIT and own:
                awaited, when = ready.of(rank, record)
                begin, end = own[0]  # No record is nested in a wait.
                until = begin if awaited == rank else min(max(when, begin), end)
                if until > begin:
                    stood[rank].append(Still(begin, until, awaited))
                still = until - begin - busy(begin, until)
                spent[
                    BUBBLE if trace.names[record["what"]][0] in (ACTIVATION, GRADIENT) else WAITING
                ] += still
                spent[COMMUNICATION] += idle[0] - still
        spent[BETWEEN] = stop - start - spent.sum()
    if not seconds.sum() > 0:  # The trace is damaged and has no breakdown.
        return None
    return TimeShares(steps, seconds, _waited(stood), timeline.workers())


class Still(NamedTuple):
    """An interval in which a rank waited for rank `other`."""

    start: float
    end: float
    other: int


def _waited(stood: Sequence[Sequence[Still]]) -> np.ndarray:
    """Return (ranks, ranks): seconds that each rank (row) waited because of each rank (column).

    stood  by rank: the intervals in which it waited
    """
    waited = np.zeros((len(stood), len(stood)))
    ordered = [sorted(stills) for stills in stood]
    ends = [[still.end for still in stills] for stills in ordered]

    def blame(waits: int, awaited: int, start: float, end: float, through: frozenset[int]) -> None:
        stills = ordered[awaited]
        for still in stills[bisect_right(ends[awaited], start) :]:
            if still.start >= end or still.other in through:
                break
            begin, until = max(still.start, start), min(still.end, end)
            waited[waits, awaited] += begin - start
            blame(waits, still.other, begin, until, through | {awaited})
            start = until
        waited[waits, awaited] += end - start

    for rank, stills in enumerate(ordered):
        for still in stills:
            blame(rank, still.other, still.start, still.end, frozenset((rank,)))
    return waited


def _busy(records: np.ndarray) -> Callable[[float, float], float]:
    """Return a function (start, end) -> seconds in which the rank's device computed."""
    spans = np.sort(records[(records["kind"] == DEVICE) & (records["end"] > 0)], order="start")
    if not len(spans):
        return lambda start, end: 0.0
    ends = np.maximum.accumulate(spans["end"])
    # Work that overlaps counts once.
    starts = np.maximum(spans["start"], np.concatenate([spans["start"][:1], ends[:-1]]))
    points = np.stack([starts, np.maximum(starts, ends)], 1).ravel()
    sums = np.cumsum(np.where(np.arange(len(points)) % 2, np.diff(points, prepend=points[0]), 0.0))

    def of(start: float, end: float) -> float:
        before, after = np.interp((start, end), points, sums)
        return float(after - before)

    return of


def _own_times(
    records: np.ndarray, start: float, stop: float
) -> Iterator[tuple[Any, list[tuple[float, float]], bool]]:
    """Yield (record, own intervals, is_paused) for the main thread's records in [start, stop].

    own intervals  (start, end) of the times of the record that are not those of records nested in
                   it
    is_paused      whether the record is a PAUSE or nested in one
    """
    spans = records[
        np.isin(records["kind"], (COMPUTE, WAIT, PAUSE))
        & (records["end"] > start)
        & (records["start"] < stop)
    ]
    # A span has a smaller number than the spans nested in it.
    spans = spans[np.argsort(spans["number"])]
    # The stack of open spans. An entry is [record, intervals of its self time, whether in a pause,
    # start of the next such interval].
    around: list[list[Any]] = []

    def leave(now: float) -> None:
        """Add the time up to `now` to the own intervals of the innermost record."""
        if around and now > around[-1][3]:
            around[-1][1].append((around[-1][3], now))

    def close(until: float) -> Iterator[tuple[Any, list[tuple[float, float]], bool]]:
        """Yield the open records that end by `until`."""
        while around and (end := min(float(around[-1][0]["end"]), stop)) <= until:
            leave(end)
            record, own, is_paused, _ = around.pop()
            yield record, own, is_paused
            if around:
                around[-1][3] = max(around[-1][3], end)

    for record in spans:
        begin = max(float(record["start"]), start)
        yield from close(begin)
        leave(begin)
        is_paused = record["kind"] == PAUSE or bool(around and around[-1][2])
        around.append([record, [], is_paused, begin])
    yield from close(stop)


class Arrivals:
    """The times at which ranks arrived at collectives, and began to send or receive messages."""

    def __init__(self, timeline: Timeline, steps: range):
        # Maps (rank, number of a wait or message) to (key, how often the rank has had this key).
        self._keys: dict[tuple[int, int], Hashable] = {}
        self._comes: dict[Hashable, list[tuple[float, int]]] = defaultdict(list)
        for rank, trace in enumerate(timeline.traces):
            counts: dict[Hashable, int] = defaultdict(int)
            for record in trace.records[np.isin(trace.records["kind"], (WAIT, SEND, RECEIVE))]:
                key = self._key(rank, trace, record)
                if key is not None and int(record["step"]) in steps:
                    counts[key] += 1
                    place = key, counts[key]
                    self._keys[rank, int(record["number"])] = place
                    self._comes[place].append((float(record["start"]), rank))

    @staticmethod
    def _key(rank: int, trace: Trace, record: Any) -> Hashable:
        """Return a key that is the same for all ranks of a collective wait.

        The keys of the two ends of a message differ only in the kind of record.
        """
        what, ranks = trace.names[record["what"]]
        if record["kind"] == WAIT:
            return (
                ("wait", int(record["step"]), what, ranks)
                if record["peer"] < 0 and len(ranks) > 1
                else None
            )
        ends = (
            (rank, int(record["peer"])) if record["kind"] == SEND else (int(record["peer"]), rank)
        )
        return "message", int(record["step"]), what, int(record["tag"]), ends, int(record["kind"])

    def of(self, rank: int, wait: Any) -> tuple[int, float]:
        """Return the rank that arrived last, and when; the waiting rank itself if that is unknown.

        wait  the record of a wait of `rank`
        """
        if wait["peer"] < 0:
            comes = self._comes.get(self._keys.get((rank, int(wait["number"]))), [])
            when, last = max(comes, default=(0.0, rank))
            return last, when
        key: Any = self._keys.get((rank, int(wait["nbytes"])))
        if key is None:
            return rank, 0.0
        (*end, kind), count = key
        when, last = max(
            self._comes.get(((*end, SEND + RECEIVE - kind), count), []), default=(0.0, rank)
        )
        return last, when
