"""Slow ranks of a living run, named by their own time: the time of steps without waits.

Ranks of a synchronous job take the same time for a step, so their own times are compared. Each rank
writes its totals into its mapped trace. Rank 0 reads all of them when it logs a step. No message is
sent. A file system that shows mapped memory late delays a name.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.files import reading
from mpitrain.parallel.grid import Axes
from mpitrain.regions import share
from mpitrain.trace.recorder import HEAD, PACE, Pace
from mpitrain.trace.timeline import trace_file

SLOW, HEALTHY = 1.3, 1.15
"""Ratio to the median of the others from which a rank is slow, and below which it no longer is."""
EXCESS = 0.002
"""Smallest excess over the median, in seconds of a step; logging takes a fraction of this."""
TIMES = 3
"""Number of consecutive readings that name a rank, or clear it."""
STEPS, SECONDS = 5, 1.0
"""Smallest number of steps, and of seconds, between two readings."""


class SlowRank(NamedTuple):
    """A slow rank.

    times  its own time of a step, as a multiple of the median of the ranks with equal work
    since  step after which it was slow
    """

    rank: int
    times: float
    since: int


class Readings:
    """Judges successive readings of all ranks' step times, and names at most one slow rank."""

    def __init__(self, alike: Sequence[Sequence[int]]):
        """Begin without a slow rank.

        alike  groups of ranks that have equal work
        """
        self._alike = alike
        self._last: Mapping[int, Pace] = {}
        self._step = 0
        self._suspect, self._seen, self._healthy = SlowRank(-1, 0.0, 0), 0, 0
        self.slow: SlowRank | None = None

    def add(self, step: int, paces: Mapping[int, Pace]) -> None:
        """Judge a reading after step `step`; ranks without totals are left out."""
        if not self._last:
            self._last, self._step = paces, step
            return
        steps = {rank: paces[rank].steps - self._last[rank].steps for rank in paces}
        seconds = [paces[rank].seconds - self._last[rank].seconds for rank in paces]
        if not steps or min(steps.values()) < STEPS or min(seconds) < SECONDS:
            return
        own = {rank: (paces[rank].own - self._last[rank].own) / steps[rank] for rank in paces}
        self._judge(_ratios(own, self._alike))
        self._last, self._step = paces, step

    def _judge(self, ratios: Mapping[int, float]) -> None:
        """Update the slow rank from the ratios of one reading, {rank: times the median}."""
        worst = max(ratios, key=lambda rank: ratios[rank], default=-1)
        if ratios.get(worst, 0.0) < SLOW:
            self._seen = 0
        elif worst == self._suspect.rank and self._seen:
            self._seen += 1
        else:
            self._suspect, self._seen = SlowRank(worst, 0.0, self._step), 1
        if self.slow:
            times = ratios.get(self.slow.rank, 0.0)
            self._healthy = self._healthy + 1 if times < HEALTHY else 0
            self.slow = None if self._healthy >= TIMES else self.slow._replace(times=times)
        if self._seen >= TIMES and (not self.slow or self.slow.rank != worst):
            self.slow, self._healthy = self._suspect._replace(times=ratios[worst]), 0


def _ratios(own: Mapping[int, float], alike: Sequence[Sequence[int]]) -> dict[int, float]:
    """Return {rank: own time of a step over the median of the others in its group}."""
    ratios = {}
    for group in alike:
        for rank in group:
            others = [own[other] for other in group if other != rank and other in own]
            if others and rank in own and (middle := median(others)) > 0:
                is_over = own[rank] - middle >= EXCESS
                ratios[rank] = own[rank] / middle if is_over else min(1.0, own[rank] / middle)
    return ratios


def alike(axes: Axes, rows: int, without: Sequence[int] = ()) -> list[list[int]]:
    """Return the groups of ranks that have equal work: the same stage, and as many rows.

    rows     batch.size
    without  ranks with work of their own; parameter servers are left out, too
    """
    groups = defaultdict(list)
    for rank in range(axes.ranks - axes.servers):
        if rank not in without:
            coords = axes.coords(rank)
            groups[coords.pp, len(share(rows, coords.dp, axes.dp))].append(rank)
    return [group for group in groups.values() if len(group) > 1]


class SlowRanks:
    """The slow rank of a run, for the lines of metrics on rank 0; opened traces stay open until `close`."""

    def __init__(self, run_dir: Path, hosts: Sequence[str], groups: Sequence[Sequence[int]]):
        """Begin without a reading; hosts by rank, groups as `alike` returns them."""
        self._run_dir, self._hosts, self._readings = run_dir, hosts, Readings(groups)
        self._files: dict[int, BinaryIO] = {}

    def record(self, step: int) -> dict[str, Any]:
        """Read the totals after step `step`; return keys of a slow rank for metrics, or {}."""
        self._readings.add(step, self.paces())
        slow = self._readings.slow
        if slow is None:
            return {}
        return {
            "slow_rank": slow.rank,
            "slow_host": self._hosts[slow.rank],
            "slow_times": slow.times,
            "slow_since": slow.since,
        }

    def paces(self) -> dict[int, Pace]:
        """Return the totals of each rank whose trace can be read."""
        paces = {}
        for rank in range(len(self._hosts)):
            with suppress(OSError, ConfigError):
                if rank not in self._files:
                    self._files[rank] = reading(trace_file(self._run_dir, rank))
                data = os.pread(self._files[rank].fileno(), PACE.size, HEAD - PACE.size)
                if len(data) == PACE.size:
                    paces[rank] = Pace(*PACE.unpack(data))
        return paces

    def close(self) -> None:
        for file in self._files.values():
            file.close()
