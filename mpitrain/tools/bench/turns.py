"""The harness of comparisons: sides take turns, and their seconds are compared block by block.

A side is one of the compared programs. A block is one turn of each side, so other work on the
machine slows all sides alike, and a ratio compares turns that are close in time.
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import median

FAR = 2.0
"""A median above FAR times the fastest run is spoilt: other work ran most of the time."""


def take_turns(
    sides: Sequence[Callable[[int], float]], blocks: int, warm_up: int = 0
) -> Iterator[list[float]]:
    """Run all sides in turns; in the last block, yield the seconds of each side by block.

    sides    (number of the block) -> seconds
    warm_up  number of blocks before block 0, whose seconds do not count; their numbers are negative
    """
    seconds: list[list[float]] = [[] for _ in sides]
    for block in range(-warm_up, blocks):
        for side, spent in zip(sides, seconds, strict=True):
            spent.append(side(block))
            if block == blocks - 1:
                yield spent[warm_up:]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """By block: return their seconds divided by ours, which is how many times as fast we are."""
    return [their_s / our_s for our_s, their_s in zip(ours, theirs, strict=True)]


def verdict(ratios: Sequence[float]) -> str:
    """Return `faster` if all ratios are above 1, `slower` if all are below, else ~."""
    if all(ratio > 1 for ratio in ratios):
        return "faster"
    return "slower" if all(ratio < 1 for ratio in ratios) else "~"


def is_spoilt(seconds: Sequence[float]) -> bool:
    """Return whether the median is far above the fastest turn: other work ran most of the time."""
    return median(seconds) > FAR * min(seconds)


def spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f} .. {max(values):.{digits}f}"
