"""Plans: the sends, receives and reductions of one rank in each step of a collective, as data.

A plan is a pure function of (rank, n, count): it needs no transport and no arrays.
`engine/executor.py` runs it. A test can add up its traffic without running anything.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from mpitrain.regions import shares


class Transfer(NamedTuple):
    """Elements [start, stop) of the array that travel to or from a peer.

    A transfer from a rank to itself is a copy, not a message.
    """

    peer: int
    start: int
    stop: int


class Step(NamedTuple):
    """Messages that are in flight together; the step ends when all of them are complete.

    combine  True: received elements are reduced into the array, in the order of `receives`;
             False: they replace the array's elements
    """

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    combine: bool = False


SEGMENT = 1 << 15
"""Smallest number of elements in a segment, where a chunk is long enough for several segments.

Each segment is one message. While one segment is reduced and sent on, the next ones arrive.
"""

DEPTH = 8
"""Segments in flight at once.

They are enough to hide the reduction, and few enough for their scratch to stay in cache.
"""


class Plan(NamedTuple):
    """Steps of one rank; at most `depth` of them are in flight at once.

    depth  step i begins when step i - depth has ended
    """

    steps: tuple[Step, ...]
    depth: int = 1


def pieces(start: int, stop: int, n: int) -> list[tuple[int, int]]:
    """Return (start, stop) of n runs that divide [start, stop) as evenly as possible.

    Some runs are empty if there are fewer than n elements.
    """
    return [(start + run.start, start + run.stop) for run in shares(stop - start, n)]


def chunk_bounds(count: int, n: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the n chunks of a whole array of `count` elements."""
    return pieces(0, count, n)


def bounds(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of parts of these lengths that follow each other."""
    return [*pairwise(accumulate(counts, initial=0))]


def segments(n: int, count: int) -> int:
    """Return the number of segments of each chunk of an array of `count` elements on n ranks.

    The number is the same on all ranks, even where their chunks differ in length.
    """
    return max(1, count // (n * SEGMENT))


def segmented(plan: Callable[[int, int, int], Plan], rank: int, n: int, count: int) -> Plan:
    """Return a pipelined plan: the plans of the segments of an array, interleaved.

    The first steps of all segments come first, then the second steps of all segments, and so on.
    """
    bounds = pieces(0, count, segments(n, count))
    plans = [relabel(plan(rank, n, stop - start), range(n), start) for start, stop in bounds]
    return Plan(
        tuple(chain.from_iterable(zip(*(p.steps for p in plans), strict=True))),
        min(DEPTH, len(plans)),
    )


def reverse(plan: Plan, combine: bool) -> Plan:
    """Return the plan backwards in time: each receive becomes a send, and each send a receive.

    A broadcast becomes a reduction this way.
    """
    return Plan(
        tuple(Step(step.receives, step.sends, combine) for step in reversed(plan.steps)), plan.depth
    )


def at_once(plan: Plan) -> Plan:
    """Return the messages of a plan as one step; received elements replace the array's.

    The steps of the plan must not depend on each other.
    """
    steps = plan.steps
    return Plan(
        (
            Step(
                tuple(t for step in steps for t in step.sends),
                tuple(t for step in steps for t in step.receives),
            ),
        )
    )


def relabel(plan: Plan, ranks: Sequence[int], offset: int = 0) -> Plan:
    """Return the plan with rank i replaced by `ranks[i]`, and all elements shifted by `offset`.

    plan  a plan for ranks 0 to n - 1 and for elements from 0
    """

    def moved(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(Transfer(ranks[t.peer], t.start + offset, t.stop + offset) for t in transfers)

    return Plan(
        tuple(Step(moved(s.sends), moved(s.receives), s.combine) for s in plan.steps), plan.depth
    )
