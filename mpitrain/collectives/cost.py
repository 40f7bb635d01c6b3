"""The alpha-beta-gamma model: how long an algorithm takes, from what its plan moves and what this machine needs for it.

    time = alpha x messages + beta x bytes sent + gamma x bytes reduced          of the busiest rank

with an alpha and a beta for messages within a host and for messages between hosts. Constants hold for arrays up to a
size (where a cache ends, others hold) and for a number of ranks (which share memory, and sometimes cores). What is not a
plan has two constants of its own: a + b x bytes of the array.

source   Hockney 1994, Parallel Computing 20(3); Thakur, Rabenseifner & Gropp 2005, Int. J. High Perform. Comput. Appl. 19(1)
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from mpitrain.collectives import algorithms
from mpitrain.collectives.hierarchical import all_reduce as hierarchical
from mpitrain.collectives.plans import Plan, Transfer

REGIMES = (1 << 13, 1 << 17, 1 << 21, 1 << 62)
"""Bytes of the array up to which one set of constants holds: latency, first cache, second cache, memory."""

TERMS = ("host_alpha", "host_beta", "net_alpha", "net_beta", "gamma")
"""Constants of the plans: seconds per message, per byte, per message, per byte, per byte."""

WHOLE = ("native", "shared", "shared-copied")
"""All-reduces that are no plan."""

PLANS = {
    "allreduce": algorithms.ALL_REDUCE, "reduce-scatter": algorithms.REDUCE_SCATTER, "all-gather": algorithms.ALL_GATHER,
    "broadcast": algorithms.BROADCAST, "reduce": algorithms.REDUCE, "all-to-all": algorithms.ALL_TO_ALL,
    "sendrecv": algorithms.PING_PONG,
}
"""Every operation's algorithms that are plans."""


class Work(NamedTuple):
    """What the busiest rank does, in the order of TERMS: counts and bytes.

    Of messages under way at once (a plan's depth) one counts: the others' latency hides behind it.
    net_bytes is what its whole host sends to others: the ranks of a host share its link.
    """

    host_messages: float = 0
    host_bytes: int = 0
    net_messages: float = 0
    net_bytes: int = 0
    reduced_bytes: int = 0


class Tuning(NamedTuple):
    """What was measured on one machine.

    machine   what identifies it: number of hosts, processor, cores, MPI
    plans     {ranks: {regime: constants in the order of TERMS}}
    whole     {ranks: {algorithm: {regime: (a, b)}}} of those that are no plan: native, shared, and shared-copied, which is
              shared for an array outside the window
    """

    machine: dict[str, Any]
    plans: dict[int, dict[int, tuple[float, ...]]]
    whole: dict[int, dict[str, dict[int, tuple[float, float]]]]


def _by_regime(*values: tuple[float, ...]) -> dict[int, Any]:
    return dict(zip(REGIMES, values, strict=True))


DEFAULT = Tuning(
    {"hosts": 1},
    {2: _by_regime((5e-6, 1e-10, 3e-5, 1e-9, 5e-11), (5e-6, 1e-10, 3e-5, 1e-9, 5e-11), (4e-6, 1e-10, 3e-5, 1e-9, 6e-11),
                   (4e-6, 2e-10, 3e-5, 1e-9, 1e-10))},
    {2: {"native": _by_regime((2e-6, 5e-10), (4e-6, 2e-10), (4e-6, 1.5e-10), (1e-4, 6e-10)),
         "shared": _by_regime((2e-6, 1e-10), (2e-6, 4e-11), (2e-6, 4e-11), (5e-5, 1.5e-10)),
         "shared-copied": _by_regime((2e-6, 2e-10), (3e-6, 1.1e-10), (3e-6, 1.5e-10), (1e-4, 5e-10))}},
)
"""A plain machine: 2 ranks on 2 cores of a server of 2023; 30 us and 1 GB/s between hosts."""


def work(operation: str, algorithm: str, hosts: Sequence[str], count: int, itemsize: int) -> Work:
    """What the busiest rank does in one run; hosts has the host name of every rank, in blocks or not."""
    busiest = Work()
    for host in dict.fromkeys(hosts[:32] + hosts[-32:]):  # plans repeat themselves: enough of a large job
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        plans = [plans_of(operation, algorithm, rank, hosts, count) for rank in ranks]
        own = max((_of_rank(mine, rank, hosts, itemsize) for mine, rank in zip(plans, ranks, strict=True)),
                  key=lambda w: (w.host_bytes, w.reduced_bytes, w.net_messages + w.host_messages))
        steps = [[step for plan in mine for step in plan.steps] for mine in plans]
        shared = sum(max(_moved(way, hosts, host) for way in ([t for s in level if s for t in s.sends],
                                                             [t for s in level if s for t in s.receives]))
                     for level in zip_longest(*steps))
        own = own._replace(net_bytes=itemsize * shared)
        busiest = max(busiest, own, key=lambda w: (w.net_bytes, w.host_bytes, w.reduced_bytes, w.host_messages))
    return busiest


def plans_of(operation: str, algorithm: str, rank: int, hosts: Sequence[str], count: int) -> tuple[Plan, ...]:
    """The plans a rank runs one after the other."""
    if algorithm == "hierarchical":
        return hierarchical(rank, hosts, count)
    return (PLANS[operation][algorithm](rank, len(hosts), count),)


def _of_rank(plans: Sequence[Plan], rank: int, hosts: Sequence[str], itemsize: int) -> Work:
    """Sum over steps. A step costs as much as the larger of what it sends and receives, since both go on at once."""
    host_messages = net_messages = 0.0
    host_elements = reduced = 0
    for step, depth in ((step, plan.depth) for plan in plans for step in plan.steps):
        ways = [[t for t in way if t.peer != rank] for way in (step.sends, step.receives)]
        near = [[t for t in way if hosts[t.peer] == hosts[rank]] for way in ways]
        host_messages += max(map(len, near)) / depth
        host_elements += max(sum(t.stop - t.start for t in way) for way in near)
        net_messages += max(len(all_) - len(close) for all_, close in zip(ways, near, strict=True)) / depth
        reduced += step.combine * sum(t.stop - t.start for t in step.receives)
    return Work(host_messages, itemsize * host_elements, net_messages, 0, itemsize * reduced)


def _moved(transfers: Sequence[Transfer], hosts: Sequence[str], host: str) -> int:
    """Elements that cross the link of a host."""
    return sum(t.stop - t.start for t in transfers if hosts[t.peer] != host)


def regime_of(nbytes: int) -> int:
    """The regime an array of that size belongs to."""
    return next(regime for regime in REGIMES if nbytes <= regime)


def predict(tuning: Tuning, operation: str, algorithm: str, hosts: Sequence[str], count: int, itemsize: int) -> float:
    """Seconds that a run takes; NaN for an algorithm that the tuning knows nothing about."""
    n, regime = len(hosts), regime_of(count * itemsize)
    if algorithm in WHOLE:
        if (len(set(hosts)) == 1) != (tuning.machine["hosts"] == 1):
            return math.nan  # measured within a host, or between hosts, and says nothing about the other
        a, b = _nearest(tuning.whole, n).get(algorithm, {}).get(regime, (math.nan, math.nan))
        return a + b * count * itemsize
    constants = _nearest(tuning.plans, n)[regime]
    seconds = sum(c * amount for c, amount in zip(constants, work(operation, algorithm, hosts, count, itemsize), strict=True))
    return seconds / 2 if operation == "sendrecv" else seconds  # one way of a ping-pong


def _nearest(by_ranks: dict[int, Any], n: int) -> Any:
    """The entry of the nearest number of ranks, in ratio."""
    return by_ranks[min(by_ranks, key=lambda ranks: abs(math.log(ranks / n)))]
