"""The alpha-beta-gamma model: how long an algorithm takes, from what its plan moves and what this machine needs for it.

    time = alpha x messages + beta x bytes sent + gamma x bytes reduced          of the busiest rank, or core

with an alpha and a beta for messages within a host and for messages between hosts. Ranks that share the cores of a host
take turns: what all of them do, divided by the cores, is a bound as well. The constants hold for a number of
ranks (which share memory, and sometimes cores) and a class of memory: MPI moves what lies in a shared window otherwise
than other memory. They change with the size of the array, as caches end: each is known at a few sizes, and in between it
follows a straight line over the logarithm of the size. An all-reduce that is not a plan has two constants of its own: a + b x
bytes of the array. Its halves, reduce-scatter and all-gather, take a part of each that their entries name.

source   Hockney 1994, Parallel Computing 20(3); Thakur, Rabenseifner & Gropp 2005, Int. J. High Perform. Comput. Appl. 19(1)
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from mpitrain.collectives.plans.steps import DEPTH, Plan, Transfer
from mpitrain.collectives.selection.table import PLANS, TABLES

KNOTS = (1 << 8, 1 << 12, 1 << 16, 1 << 21, 1 << 24)
"""Bytes of the array at which the constants are known; the first hold below, the last above."""

EAGER = 4000
"""Bytes of a message within a host up to which MPI sends it at once; a longer one waits for its receiver first."""

TERMS = ("host_alpha", "host_long", "host_beta", "net_alpha", "net_beta", "gamma")
"""Constants of the plans: seconds per message, per long message beside that, per byte, per message, per byte, per byte."""

MEMORY = ("window", "plain")
"""Where arrays lie: in memory shared by the ranks of a host, or anywhere else."""

ENDS = 2
"""Hosts at either end of a job that are looked at, and the one with most ranks: plans treat the others as one of them."""


class Work(NamedTuple):
    """What the busiest rank does, in the order of TERMS: counts and bytes. host_long are those longer than EAGER.

    Of messages to other hosts under way at once (a plan's depth) one counts: the others' latency hides behind it.
    net_bytes is what its whole host sends to others: the ranks of a host share its link.
    """

    host_messages: float = 0
    host_long: float = 0
    host_bytes: float = 0
    net_messages: float = 0
    net_bytes: float = 0
    reduced_bytes: float = 0


Constants = dict[int, tuple[float, ...]]
"""{knot: seconds per unit of each amount}."""


class Tuning(NamedTuple):
    """What was measured on one machine.

    machine   what identifies it: number of hosts, processor, cores, MPI
    plans     {ranks: {memory: constants in the order of TERMS}}
    whole     {ranks: {memory: {algorithm: constants a and b}}} of those that are no plan
    """

    machine: dict[str, Any]
    plans: dict[int, dict[str, Constants]]
    whole: dict[int, dict[str, dict[str, Constants]]]


def shares(nbytes: int) -> list[float]:
    """How much the constants at each knot count for an array of that size: one or two of them, 1 in all."""
    if not KNOTS[0] < nbytes < KNOTS[-1]:
        return [float(knot == (KNOTS[0] if nbytes <= KNOTS[0] else KNOTS[-1])) for knot in KNOTS]
    above = bisect_right(KNOTS, nbytes)
    part = math.log2(nbytes / KNOTS[above - 1]) / math.log2(KNOTS[above] / KNOTS[above - 1])
    return [part if i == above else 1 - part if i == above - 1 else 0.0 for i in range(len(KNOTS))]


def work(
    operation: str, algorithm: str, hosts: Sequence[str], count: int, itemsize: int, cores: int
) -> Work:
    """What the busiest rank does in one run, or what each core has to do for all ranks of its host, if that is more.

    hosts   the host name of every rank, in blocks or not
    cores   of a host
    """
    distinct, times = list(dict.fromkeys(hosts)), _segments(operation, algorithm, hosts, count)
    short, busiest = (
        count // times,
        Work(),
    )  # an array of one segment, which tells of all: a long plan takes seconds to make
    longer = count / short if short else 1.0
    for host in dict.fromkeys(
        [*distinct[:ENDS], *distinct[-ENDS:], max(distinct, key=hosts.count)]
    ):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        plans = [plans_of(operation, algorithm, rank, hosts, short) for rank in ranks]
        works = [
            _of_rank(mine, rank, hosts, itemsize * longer, times)
            for mine, rank in zip(plans, ranks, strict=True)
        ]
        own = max(
            works, key=lambda w: (w.host_bytes, w.reduced_bytes, w.net_messages + w.host_messages)
        )
        own = Work(
            *(
                max(amount, sum(amounts) / cores)
                for amount, *amounts in zip(own, *works, strict=True)
            )
        )
        steps = [[step for plan in mine for step in plan.steps] for mine in plans]
        shared = sum(
            max(
                _moved(way, hosts, host)
                for way in (
                    [t for s in level if s for t in s.sends],
                    [t for s in level if s for t in s.receives],
                )
            )
            for level in zip_longest(*steps)
        )
        own = own._replace(net_bytes=itemsize * longer * shared)
        busiest = max(
            busiest,
            own,
            key=lambda w: (w.net_bytes, w.host_bytes, w.reduced_bytes, w.host_messages),
        )
    return busiest


def _segments(operation: str, algorithm: str, hosts: Sequence[str], count: int) -> int:
    """How often the plan of one segment is repeated in that of the array; 1 where there are no segments."""
    return TABLES[operation][algorithm].segments(hosts, count) if operation in TABLES else 1


def plans_of(
    operation: str, algorithm: str, rank: int, hosts: Sequence[str], count: int
) -> tuple[Plan, ...]:
    """The plans a rank runs one after the other."""
    if operation in TABLES:
        plans = TABLES[operation][algorithm].plans
        assert plans is not None  # asked only of what `is_whole` denies
        return plans(rank, hosts, count)
    return (PLANS[operation][algorithm](rank, len(hosts), count),)


def is_whole(operation: str, algorithm: str) -> bool:
    """Whether an algorithm is no plan, so that its cost is measured whole."""
    return operation in TABLES and TABLES[operation][algorithm].plans is None


def _of_rank(
    plans: Sequence[Plan], rank: int, hosts: Sequence[str], width: float, times: int
) -> Work:
    """Sum over steps. A step costs as much as the larger of what it sends and receives, since both go on at once; but within
    a host a message is mostly work for its two ranks: each counts that is sent or received, and hides behind no other.

    plans  of one segment; of three, only the middle one is repeated, and the others move all segments at once
    width  bytes of the array that an element of the segment stands for
    times  how many segments there are
    """
    host_messages = host_long = host_bytes = net_messages = reduced = 0.0
    for place, plan in enumerate(plans):
        again = 1 if len(plans) == 3 and place != 1 else times
        depth = plan.depth if again == 1 else min(DEPTH, again)
        for step in plan.steps:
            ways = [[t for t in way if t.peer != rank] for way in (step.sends, step.receives)]
            near = [[t for t in way if hosts[t.peer] == hosts[rank]] for way in ways]
            host_messages += again * sum(map(len, near))
            host_long += again * sum(
                width * (t.stop - t.start) > EAGER * again for way in near for t in way
            )
            host_bytes += width * max(sum(t.stop - t.start for t in way) for way in near)
            net_messages += (
                again
                * max(len(all_) - len(close) for all_, close in zip(ways, near, strict=True))
                / depth
            )
            reduced += step.combine * width * sum(t.stop - t.start for t in step.receives)
    return Work(host_messages, host_long, host_bytes, net_messages, 0, reduced)


def _moved(transfers: Sequence[Transfer], hosts: Sequence[str], host: str) -> int:
    """Elements that cross the link of a host."""
    return sum(t.stop - t.start for t in transfers if hosts[t.peer] != host)


def predict(
    tuning: Tuning,
    operation: str,
    algorithm: str,
    hosts: Sequence[str],
    count: int,
    itemsize: int,
    memory: str = "plain",
) -> float:
    """Seconds that a run takes on arrays in that memory; NaN for an algorithm that the tuning knows nothing about."""
    n, nbytes = len(hosts), count * itemsize
    plans, whole = (_nearest(found, n) for found in (tuning.plans, tuning.whole))
    memory = memory if memory in plans else "plain"
    amounts: tuple[float, ...]
    if is_whole(operation, algorithm):
        if (len(set(hosts)) == 1) != (tuning.machine["hosts"] == 1):
            return (
                math.nan
            )  # measured within a host, or between hosts, and says nothing about the other
        once, per_byte = TABLES[operation][algorithm].of_all_reduce
        constants, amounts = whole[memory].get(algorithm), (once, per_byte * nbytes)
    else:
        constants = plans[memory]
        amounts = work(operation, algorithm, hosts, count, itemsize, tuning.machine["cores"])
    if constants is None:
        return math.nan
    seconds = sum(
        share * sum(c * amount for c, amount in zip(constants[knot], amounts, strict=True))
        for knot, share in zip(KNOTS, shares(nbytes), strict=True)
        if share
    )
    return seconds / 2 if operation == "sendrecv" else seconds  # one way of a ping-pong


def _nearest(by_ranks: dict[int, Any], n: int) -> Any:
    """The entry of the nearest number of ranks, in ratio."""
    return by_ranks[min(by_ranks, key=lambda ranks: abs(math.log(ranks / n)))]
