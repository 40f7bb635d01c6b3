"""Plans: what one rank sends, receives and combines, step by step, as data.

A plan is a pure function of (rank, n, count): no transport, no arrays. `execute.py` runs it; a test can add up what it
moves without running anything.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple


class Transfer(NamedTuple):
    """Elements start to stop of the array, to or from a peer. A transfer to oneself is a copy and no message."""

    peer: int
    start: int
    stop: int


class Step(NamedTuple):
    """Messages that are under way together; the step ends when all of them are complete.

    combine   received elements are reduced into the array, in the order of `receives`; otherwise they replace it
    """

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    combine: bool = False


SEGMENT = 1 << 15
"""Elements of a chunk that travel in one message. Plans of long arrays are many short ones in turn: while one segment is
reduced and sent on, the next ones arrive."""

DEPTH = 8
"""Segments under way at once: enough to hide the reduction, few enough for their scratch to stay in cache."""


class Plan(NamedTuple):
    """Steps, of which `depth` may be under way at once: step i begins when step i - depth has ended."""

    steps: tuple[Step, ...]
    depth: int = 1


def pieces(start: int, stop: int, n: int) -> list[tuple[int, int]]:
    """(start, stop) of each of n runs from start to stop, as even as can be; some are empty when there are fewer."""
    count = stop - start
    return [(start + piece * count // n, start + (piece + 1) * count // n) for piece in range(n)]


def chunk_bounds(count: int, n: int) -> list[tuple[int, int]]:
    """(start, stop) of the n chunks of a whole array of `count` elements."""
    return pieces(0, count, n)


def segments(n: int, count: int) -> int:
    """Into how many segments the chunks of an array are cut: one number for all n ranks, whatever their chunks."""
    return max(1, count // (n * SEGMENT))


def segmented(plan: Callable[[int, int, int], Plan], rank: int, n: int, count: int) -> Plan:
    """The plans of the segments of an array in turn: the first steps of all of them, then the second ones ..."""
    bounds = pieces(0, count, segments(n, count))
    plans = [relabel(plan(rank, n, stop - start), range(n), start) for start, stop in bounds]
    return Plan(
        tuple(chain.from_iterable(zip(*(p.steps for p in plans), strict=True))),
        min(DEPTH, len(plans)),
    )


def reverse(plan: Plan, combine: bool) -> Plan:
    """The plan played backwards: what was received is sent. A broadcast becomes a reduction this way."""
    return Plan(
        tuple(Step(step.receives, step.sends, combine) for step in reversed(plan.steps)), plan.depth
    )


def at_once(plan: Plan) -> Plan:
    """The same messages, all under way together, for plans whose steps do not build on each other."""
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
    """A plan made for ranks 0 to n - 1 and elements from 0, moved to these ranks and to elements from `offset`."""

    def moved(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(Transfer(ranks[t.peer], t.start + offset, t.stop + offset) for t in transfers)

    return Plan(
        tuple(Step(moved(s.sends), moved(s.receives), s.combine) for s in plan.steps), plan.depth
    )
