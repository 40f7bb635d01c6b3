"""Where the time of each rank went: computing, and standing still for one of three reasons.

A wait for several ranks counts as waiting until the last of them came to it, and as communication from then on. A wait for one
rank counts as waiting until that rank began its end of the message: between stages of a pipeline that is the bubble. Who is
waited for and waits itself meanwhile is not to blame, but whom it waits for. While a GPU computes, its rank does.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.pipeline.instructions import ACTIVATION, GRADIENT
from mpitrain.report.timeline import Timeline
from mpitrain.trace.read import Trace
from mpitrain.trace.ring_buffer import COMPUTE, DEVICE, PAUSE, RECEIVE, SEND, WAIT

SHARES = (
    "computing",
    "exposed communication",
    "bubble",
    "waiting for another rank",
    "evaluation, checkpoint",
    "in between",
)
COMPUTING, COMMUNICATION, BUBBLE, WAITING, PAUSES, BETWEEN = range(len(SHARES))


class Shares(NamedTuple):
    """Seconds of some steps, what lay between them included.

    steps      their numbers, from 0
    seconds    (ranks, shares), which sum to the time that each rank was at these steps
    waited     (ranks, ranks): how long each rank stood still because of each
    workers    the ranks that compute rows: all but parameter servers, whose idle time holds up nobody
    """

    steps: range
    seconds: np.ndarray
    waited: np.ndarray
    workers: Sequence[int]

    @property
    def of_all(self) -> np.ndarray:
        """The share of each of SHARES in the time of all ranks: they sum to 1."""
        return self.seconds.sum(0) / self.seconds.sum()

    @property
    def waits(self) -> np.ndarray:
        """(ranks,): how long workers stood still because of each rank, servers among them."""
        return self.waited[self.workers].sum(0)

    @property
    def slowest(self) -> int | None:
        """The rank that workers waited for longest; None if they waited for none."""
        return int(self.waits.argmax()) if self.waits.any() else None


def shares(timeline: Timeline) -> Shares | None:
    """Where the time of the steps went that all ranks have; None if there are none, or they took no time."""
    steps, ranks = timeline.steps(), len(timeline.traces)
    if not steps:
        return None
    ready, seconds = _Ready(timeline, steps), np.zeros((ranks, len(SHARES)))
    stood: list[list[Still]] = [[] for _ in range(ranks)]
    for rank, trace in enumerate(timeline.traces):
        start, stop = timeline.window(rank, steps)
        busy, mine = _busy(trace.records), seconds[rank]
        mine[COMPUTING] = busy(start, stop)
        for record, own, is_paused in _own_times(trace.records, start, stop):
            idle = [(end - begin) - busy(begin, end) for begin, end in own]
            if is_paused:
                mine[PAUSES] += sum(end - begin for begin, end in own)
                mine[COMPUTING] -= sum(busy(begin, end) for begin, end in own)
            elif record["kind"] == COMPUTE:
                mine[COMPUTING] += sum(idle)
            elif record["kind"] == WAIT and own:
                other, when = ready.of(rank, record)
                begin, end = own[0]  # nothing is nested in a wait
                until = begin if other == rank else min(max(when, begin), end)
                if until > begin:
                    stood[rank].append(Still(begin, until, other))
                still = until - begin - busy(begin, until)
                mine[
                    BUBBLE if trace.names[record["what"]][0] in (ACTIVATION, GRADIENT) else WAITING
                ] += still
                mine[COMMUNICATION] += idle[0] - still
        mine[BETWEEN] = stop - start - mine.sum()
    if not seconds.sum() > 0:  # of a trace that was damaged: nobody can say shares of it
        return None
    return Shares(steps, seconds, _waited(stood), timeline.workers())


class Still(NamedTuple):
    """A rank stood still for another one."""

    start: float
    end: float
    other: int


def _waited(stood: Sequence[Sequence[Still]]) -> np.ndarray:
    """(ranks, ranks): seconds that each rank stood still because of each, by when each stood still for whom."""
    found = np.zeros((len(stood), len(stood)))
    ordered = [sorted(mine) for mine in stood]
    ends = [[still.end for still in mine] for mine in ordered]

    def blame(waits: int, other: int, start: float, end: float, through: frozenset[int]) -> None:
        mine = ordered[other]
        for still in mine[bisect_right(ends[other], start) :]:
            if still.start >= end or still.other in through:
                break
            begin, until = max(still.start, start), min(still.end, end)
            found[waits, other] += begin - start
            blame(waits, still.other, begin, until, through | {other})
            start = until
        found[waits, other] += end - start

    for rank, mine in enumerate(ordered):
        for still in mine:
            blame(rank, still.other, still.start, still.end, frozenset((rank,)))
    return found


def _busy(records: np.ndarray) -> Callable[[float, float], float]:
    """How many seconds of an interval the device of a rank computed."""
    spans = np.sort(records[(records["kind"] == DEVICE) & (records["end"] > 0)], order="start")
    if not len(spans):
        return lambda start, end: 0.0
    ends = np.maximum.accumulate(spans["end"])
    starts = np.maximum(
        spans["start"], np.concatenate([spans["start"][:1], ends[:-1]])
    )  # work that overlaps counts once
    points = np.stack([starts, np.maximum(starts, ends)], 1).ravel()
    sums = np.cumsum(np.where(np.arange(len(points)) % 2, np.diff(points, prepend=points[0]), 0.0))

    def of(start: float, end: float) -> float:
        before, after = np.interp((start, end), points, sums)
        return float(after - before)

    return of


def _own_times(
    records: np.ndarray, start: float, stop: float
) -> Iterator[tuple[Any, list[tuple[float, float]], bool]]:
    """What the rank's own thread did in [start, stop]: (record, intervals without what is nested in it, whether in a pause)."""
    mine = records[
        np.isin(records["kind"], (COMPUTE, WAIT, PAUSE))
        & (records["end"] > start)
        & (records["start"] < stop)
    ]
    mine = mine[np.argsort(mine["number"])]  # a span is noted before those within it
    around: list[
        list[Any]
    ] = []  # of spans that last: [record, its own intervals, whether in a pause, own since]

    def leave(now: float) -> None:
        """Whoever is innermost does something of its own until now."""
        if around and now > around[-1][3]:
            around[-1][1].append((around[-1][3], now))

    def close(until: float) -> Iterator[tuple[Any, list[tuple[float, float]], bool]]:
        while around and (end := min(float(around[-1][0]["end"]), stop)) <= until:
            leave(end)
            record, own, is_paused, _ = around.pop()
            yield record, own, is_paused
            if around:
                around[-1][3] = max(around[-1][3], end)

    for record in mine:
        begin = max(float(record["start"]), start)
        yield from close(begin)
        leave(begin)
        is_paused = record["kind"] == PAUSE or bool(around and around[-1][2])
        around.append([record, [], is_paused, begin])
    yield from close(stop)


class _Ready:
    """When those came for whom a rank waited."""

    def __init__(self, timeline: Timeline, steps: range):
        self._keys: dict[tuple[int, int], Hashable] = {}  # by rank and number of a wait or message
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
        """The rank that was waited for last, and when it came; this one, if nobody can tell."""
        if wait["peer"] < 0:
            comes = self._comes.get(self._keys.get((rank, int(wait["number"]))), [])
            when, last = max(comes, default=(0.0, rank))
            return last, when
        mine: Any = self._keys.get((rank, int(wait["nbytes"])))
        if mine is None:
            return rank, 0.0
        (*end, kind), count = mine
        when, last = max(
            self._comes.get(((*end, SEND + RECEIVE - kind), count), []), default=(0.0, rank)
        )
        return last, when
