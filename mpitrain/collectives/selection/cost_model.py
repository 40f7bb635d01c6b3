"""The alpha-beta-gamma model: predicts the time of an algorithm from its plan, and chooses by it.

    time = alpha x messages + beta x bytes sent + gamma x bytes reduced

These are the numbers of the busiest rank. Messages within a host and messages between hosts have
different alpha and beta. Ranks that share the cores of a host take turns. So the work of all
ranks of a host, divided by its cores, is a bound too.

Constants hold for a level: ranks of one socket, of one host, or of several hosts. They hold for a
number of ranks, which share memory and sometimes cores. They also hold for a class of memory,
because MPI moves arrays in a shared window differently. They change with the size of the array, as
caches overflow. They are measured at a few sizes, and interpolated linearly
over the logarithm of the size.

An all-reduce without a plan has two constants of its own: a + b x bytes of the array. Its halves,
reduce-scatter and all-gather, take fractions of these constants, which their descriptors state.

source   Hockney 1994, Parallel Computing 20(3);
         Thakur, Rabenseifner & Gropp 2005, Int. J. High Perform. Comput. Appl. 19(1)
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from mpitrain.collectives.plans.steps import DEPTH, Plan, Step, Transfer
from mpitrain.collectives.selection.algorithm import Topology
from mpitrain.collectives.selection.table import ALL_REDUCE, PLANS, TABLES

KNOTS = (1 << 8, 1 << 12, 1 << 16, 1 << 21, 1 << 24)
"""Knots of the interpolation: array sizes in bytes at which the constants are measured.

Smaller and larger arrays use the constants of the nearest knot.
"""

EAGER = 4000
"""Largest message within a host, in bytes, that MPI sends eagerly.

A longer one waits for its receiver first (rendezvous protocol).
"""

TERMS = ("host_alpha", "host_long", "host_beta", "net_alpha", "net_beta", "gamma")
"""Constants of the plans, in seconds.

host_alpha  per message within a host
host_long   per message within a host that is longer than EAGER, in addition
host_beta   per byte within a host
net_alpha   per message between hosts
net_beta    per byte between hosts
gamma       per byte reduced
"""

MEMORY = ("window", "plain")
"""Classes of memory: windows shared by the ranks of a host, and all other memory."""

ENDS = 2
"""Number of hosts at each end of a job that `work` evaluates, in addition to the fullest host.

Plans treat all other hosts like one of these.
"""


class Work(NamedTuple):
    """Work of the busiest rank, in the order of TERMS: counts and bytes.

    host_long      messages longer than EAGER
    net_messages   messages to other hosts; of those in flight at once (a plan's depth) only one
                   counts, because the latency of the others overlaps with it
    net_bytes      bytes that its whole host sends to others, because its ranks share one link
    """

    host_messages: float = 0
    host_long: float = 0
    host_bytes: float = 0
    net_messages: float = 0
    net_bytes: float = 0
    reduced_bytes: float = 0


Constants = dict[int, tuple[float, ...]]
"""{array size in bytes, one of KNOTS: the constants, in the order of TERMS or (a, b)}."""


LEVELS = ("socket", "host", "network")
"""What ranks may span, the narrowest first: one socket of several, one host, several hosts."""


class Level(NamedTuple):
    """Constants that were measured with ranks of one level.

    plans  {ranks: {memory: constants in the order of TERMS}}
    whole  {ranks: {memory: {algorithm: constants a and b}}} of algorithms without a plan
    """

    plans: dict[int, dict[str, Constants]]
    whole: dict[int, dict[str, dict[str, Constants]]]


class Tuning(NamedTuple):
    """Measured constants of one machine.

    machine  description: number of hosts, processor, cores and sockets of a host, MPI
    levels   {one of LEVELS: its constants}, at least one
    """

    machine: dict[str, Any]
    levels: dict[str, Level]

    def nearest(self, level: str) -> tuple[str, Level]:
        """Return the name and the constants of this level, or of the nearest one that was measured."""
        at = LEVELS.index(level)
        name = min(self.levels, key=lambda each: (abs(LEVELS.index(each) - at), LEVELS.index(each)))
        return name, self.levels[name]


def level_of(hosts: Sequence[str], sockets: Sequence[str] = ()) -> str:
    """Return the level that ranks span.

    hosts    host name of every rank
    sockets  name of every rank's socket, unique in its host; "": not known, or the only one
    """
    if len(set(hosts)) > 1:
        return "network"
    return "socket" if len(set(sockets)) == 1 and sockets[0] else "host"


def shares(nbytes: int) -> list[float]:
    """Return the interpolation weight of each knot; one or two are not 0, and their sum is 1."""
    if not KNOTS[0] < nbytes < KNOTS[-1]:
        return [float(knot == (KNOTS[0] if nbytes <= KNOTS[0] else KNOTS[-1])) for knot in KNOTS]
    above = bisect_right(KNOTS, nbytes)
    part = math.log2(nbytes / KNOTS[above - 1]) / math.log2(KNOTS[above] / KNOTS[above - 1])
    return [part if i == above else 1 - part if i == above - 1 else 0.0 for i in range(len(KNOTS))]


def work(
    operation: str, algorithm: str, hosts: Sequence[str], count: int, itemsize: int, cores: int
) -> Work:
    """Return the work of the busiest rank in one run.

    The work of all ranks of its host, divided by the cores, counts instead if it is more.

    hosts   host name of every rank; ranks of a host need not be adjacent
    cores   number of cores of a host
    """
    row: object = (
        TABLES[operation][algorithm] if operation in TABLES else PLANS[operation][algorithm]
    )
    return _work(row, operation, algorithm, tuple(hosts), count, itemsize, cores)


@lru_cache(maxsize=1024)
def _work(
    row: object,
    operation: str,
    algorithm: str,
    hosts: tuple[str, ...],
    count: int,
    itemsize: int,
    cores: int,
) -> Work:
    """Return `work`; row: of the algorithm, since another one may get its name."""
    distinct, times = list(dict.fromkeys(hosts)), _segments(operation, algorithm, hosts, count)
    # One segment represents all of them, because a long plan takes seconds to make.
    short, busiest = count // times, Work()
    longer = count / short if short else 1.0
    for host in dict.fromkeys(
        [*distinct[:ENDS], *distinct[-ENDS:], max(distinct, key=hosts.count)]
    ):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        works, moved = [], list[tuple[int, int]]()
        for rank in ranks:  # One rank's plans at a time: those of all ranks would fill the memory.
            plans = plans_of(operation, algorithm, rank, hosts, short)
            works.append(_of_rank(plans, rank, hosts, itemsize * longer, times, moved))
        own = max(
            works, key=lambda w: (w.host_bytes, w.reduced_bytes, w.net_messages + w.host_messages)
        )
        own = Work(
            *(
                max(amount, sum(amounts) / cores)
                for amount, *amounts in zip(own, *works, strict=True)
            )
        )
        shared = sum(map(max, moved))
        own = own._replace(net_bytes=itemsize * longer * shared)
        busiest = max(
            busiest,
            own,
            key=lambda w: (w.net_bytes, w.host_bytes, w.reduced_bytes, w.host_messages),
        )
    return busiest


def _segments(operation: str, algorithm: str, hosts: Sequence[str], count: int) -> int:
    return TABLES[operation][algorithm].segments(hosts, count) if operation in TABLES else 1


def plans_of(
    operation: str, algorithm: str, rank: int, hosts: Sequence[str], count: int
) -> tuple[Plan, ...]:
    """Return the plans that a rank runs one after the other: several for two-level algorithms."""
    if operation in TABLES:
        table = TABLES[operation]
        plans = table[algorithm].plans
        assert plans is not None  # callers exclude algorithms that `is_whole` accepts
        if not table.is_added(algorithm):
            return plans(rank, hosts, count)
        return table.made(
            algorithm,
            "algorithm",
            lambda: plans(rank, hosts, count),
            "plans with steps of transfers and a depth of at least 1",
            _are_plans,
        )
    return (PLANS[operation][algorithm](rank, len(hosts), count),)


def _are_plans(made: Any) -> bool:
    return isinstance(made, tuple) and all(
        isinstance(plan, Plan)
        and isinstance(plan.steps, tuple)
        and (type(plan.depth) is int and plan.depth > 0)
        and all(isinstance(step, Step) for step in plan.steps)
        and all(isinstance(t, Transfer) for s in plan.steps for t in (*s.sends, *s.receives))
        for plan in made
    )


def is_whole(operation: str, algorithm: str) -> bool:
    """Return whether an algorithm has no plan, so that it is measured as a whole."""
    return operation in TABLES and TABLES[operation][algorithm].plans is None


def _of_rank(
    plans: Sequence[Plan],
    rank: int,
    hosts: Sequence[str],
    width: float,
    times: int,
    far: list[tuple[int, int]],
) -> Work:
    """Return the work of one rank: the sum over the steps of its plans.

    A step costs the larger of its sends and receives, because both progress at once. Within a host
    each message occupies the core of its sender and of its receiver. So sends and receives both
    count there.

    plans  plans of one segment; of three plans, only the middle one is repeated for each segment,
           and the first and the last move all segments at once
    width  bytes of the array for each element of the segment
    times  number of segments
    far    receives for each step the elements sent to and received from other hosts, in addition
    """
    host_messages = host_long = host_bytes = net_messages = reduced = 0.0
    here, level = hosts[rank], 0
    far += [(0, 0)] * (sum(len(plan.steps) for plan in plans) - len(far))
    for place, plan in enumerate(plans):
        again = 1 if len(plans) == 3 and place != 1 else times
        depth = plan.depth if again == 1 else min(DEPTH, again)
        for step in plan.steps:
            near, messages, elements = [0, 0], [0, 0], [0, 0]
            for way, transfers in enumerate((step.sends, step.receives)):
                for peer, start, stop in transfers:
                    if hosts[peer] != here:
                        messages[way] += 1
                        elements[way] += stop - start
                    elif peer != rank:
                        host_messages += again
                        host_long += again * (width * (stop - start) > EAGER * again)
                        near[way] += stop - start
                    if way and step.combine:
                        reduced += width * (stop - start)
            host_bytes += width * max(near)
            net_messages += again * max(messages) / depth
            if messages != [0, 0]:
                far[level] = far[level][0] + elements[0], far[level][1] + elements[1]
            level += 1
    return Work(host_messages, host_long, host_bytes, net_messages, 0, reduced)


def predict(
    tuning: Tuning,
    operation: str,
    algorithm: str,
    hosts: Sequence[str],
    count: int,
    itemsize: int,
    memory: str = "plain",
    level: str = "",
) -> float:
    """Return the predicted seconds of one run; NaN for an algorithm that the tuning lacks.

    level  that the ranks span; "": the one that their hosts show
    """
    n, nbytes, spanned = len(hosts), count * itemsize, level or level_of(hosts)
    name, measured = tuning.nearest(spanned)
    plans, whole = (_nearest(by_ranks, n) for by_ranks in measured)
    memory = memory if memory in plans else "plain"
    amounts: tuple[float, ...]
    if is_whole(operation, algorithm):
        if (spanned == "network") != (name == "network"):
            # A measurement within a host does not apply between hosts, nor the other way round.
            return math.nan
        once, per_byte = TABLES[operation][algorithm].of_all_reduce
        constants, amounts = whole[memory].get(algorithm), (once, per_byte * nbytes)
    else:
        constants = plans[memory]
        if operation not in TABLES:
            constants = {knot: _of_messages(at) for knot, at in constants.items()}
        amounts = work(operation, algorithm, hosts, count, itemsize, tuning.machine["cores"])
    if constants is None:
        return math.nan
    seconds = sum(
        share * sum(c * amount for c, amount in zip(constants[knot], amounts, strict=True))
        for knot, share in zip(KNOTS, shares(nbytes), strict=True)
        if share
    )
    return seconds / 2 if operation == "sendrecv" else seconds  # a ping-pong sends the array twice


def _of_messages(fitted: tuple[float, ...]) -> tuple[float, ...]:
    """Return constants for plans that add nothing.

    All-reduces add what they move, so their fit may give all seconds of a byte to the adding. Then
    half of them are those of moving: adding reads two bytes for each one that moving reads.
    """
    at = TERMS.index("host_beta")
    return (*fitted[:at], fitted[at] or fitted[TERMS.index("gamma")] / 2, *fitted[at + 1 :])


def _nearest(by_ranks: dict[int, Any], n: int) -> Any:
    return by_ranks[min(by_ranks, key=lambda ranks: abs(math.log(ranks / n)))]


def candidates(topology: Topology, operation: str = "allreduce") -> list[str]:
    """Return the algorithms that "auto" considers."""
    return [
        name
        for name, algorithm in TABLES[operation].items()
        if algorithm.refusal(topology) is None and algorithm.is_rival(topology)
    ]


def choose(
    tuning: Tuning,
    topology: Topology,
    count: int,
    itemsize: int,
    memory: str = "window",
    operation: str = "allreduce",
) -> str:
    """Return the algorithm with the shortest predicted time for an array in this memory class."""

    def seconds(algorithm: str) -> float:
        predicted = predict(tuning, operation, algorithm, topology.hosts, count, itemsize, memory)
        return predicted if predicted == predicted else float("inf")

    return min(candidates(topology, operation), key=seconds)


def part_bytes(
    tuning: Tuning, algorithm: str, hosts: Sequence[str], count: int, itemsize: int
) -> float:
    """Return the best bucket size in bytes, for reductions that overlap with computation.

    It corresponds to DDP's `bucket_cap_mb`. Buckets are reduced one after the other. One more
    bucket does not overlap: it is computed before the first reduction, or reduced after the last
    computation. Many buckets cost latency; few buckets make this exposed one long.

    algorithm  an algorithm without plans counts as ring
    """
    algorithm = algorithm if algorithm in ALL_REDUCE and ALL_REDUCE[algorithm].plans else "ring"

    def seconds(parts: int) -> float:
        return (parts + 1) * predict(
            tuning, "allreduce", algorithm, hosts, -(-count // parts), itemsize
        )

    return count * itemsize / min((2**power for power in range(9)), key=seconds)
