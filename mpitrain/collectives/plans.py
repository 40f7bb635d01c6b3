"""Plans: what one rank sends, receives and combines, step by step, as data.

A plan is a pure function of (rank, n, count): no transport, no arrays. `execute.py` runs it; a test can add up what it
moves without running anything.
"""

from typing import NamedTuple


class Transfer(NamedTuple):
    """Elements start to stop of the array, to or from a peer."""

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


class Plan(NamedTuple):
    """Steps, of which `depth` may be under way at once: step i begins when step i - depth has ended."""

    steps: tuple[Step, ...]
    depth: int = 1


def chunk_bounds(count: int, n: int) -> list[tuple[int, int]]:
    """(start, stop) of each of n chunks of `count` elements, as even as can be; some are empty when count < n."""
    return [(chunk * count // n, (chunk + 1) * count // n) for chunk in range(n)]
