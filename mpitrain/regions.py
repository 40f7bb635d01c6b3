"""Intervals of elements, and their algebra.

An interval is anything with a `start` and a `stop`: a `Piece`, a stored tensor, a bucket or a
`range`. `Runs` are many intervals at once, as arrays.

    share     one of several nearly equal runs
    overlap   of two intervals
    within    pieces of a buffer inside an interval
    without   pieces minus other intervals
    cut       pieces of a greatest length
    common    of two `Runs` of one tensor, which is how a checkpoint finds its way into a new layout
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np


class Interval(Protocol):
    """The elements start .. stop - 1."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


class Piece(NamedTuple):
    """Elements [start, stop) of a flat buffer, and their offset `offset` in the owner's compact
    buffer.

    The whole buffer is Piece(0, length, 0).
    """

    start: int
    stop: int
    offset: int


class Runs(NamedTuple):
    """Runs of elements that are contiguous both in the flattened tensor and in an array.

    start   offset of each run in the flattened tensor, ascending; (runs,) int64
    offset  offset of each run in the array; (runs,) int64
    length  elements of each run; (runs,) int64
    """

    start: np.ndarray
    offset: np.ndarray
    length: np.ndarray


class Common(NamedTuple):
    """The intersection of two `Runs`, ascending in the tensor.

    one     offset of each common run in the array of the first; (runs,) int64
    other   offset of each common run in the array of the second; (runs,) int64
    length  elements of each common run; (runs,) int64
    """

    one: np.ndarray
    other: np.ndarray
    length: np.ndarray


def share(count: int, part: int, parts: int) -> range:
    """Return the part-th of `parts` nearly equal runs of `count` things.

    No run is empty if parts <= count.
    """
    return range(part * count // parts, (part + 1) * count // parts)


def shares(count: int, parts: int) -> list[range]:
    """Return all of these runs."""
    return [share(count, part, parts) for part in range(parts)]


def overlap(one: Interval, other: Interval) -> range:
    """Return the elements that two intervals share; it is false if there are none."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def moved(interval: Interval, by: int) -> slice:
    """Return the slice [start + by, stop + by)."""
    return slice(interval.start + by, interval.stop + by)


def within(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Intersect pieces with the interval [start, stop)."""
    for piece in pieces:
        if both := overlap(piece, range(start, stop)):
            yield Piece(both.start, both.stop, piece.offset + both.start - piece.start)


def without(pieces: Iterable[Piece], others: Iterable[Interval]) -> list[Piece]:
    """Subtract other intervals from pieces."""
    left = list(pieces)
    for other in others:
        if not any(overlap(piece, other) for piece in left):
            continue
        left = [
            rest
            for piece in left
            for rest in (
                *within([piece], piece.start, other.start),
                *within([piece], other.stop, piece.stop),
            )
        ]
    return left


def cut(pieces: Iterable[Piece], count: int) -> Iterator[Piece]:
    """Split pieces into pieces of at most `count` elements."""
    for piece in pieces:
        for start in range(piece.start, piece.stop, count):
            yield from within([piece], start, start + count)


def one_run(start: int, length: int, offset: int = 0) -> Runs:
    """Return one contiguous run as `Runs`."""
    return Runs(*(np.array([number], np.int64) for number in (start, offset, length)))


def common(one: Runs, other: Runs) -> Common:
    """Intersect two `Runs` of the same tensor."""
    first = np.searchsorted(other.start + other.length, one.start, "right")
    matches = np.maximum(np.searchsorted(other.start, one.start + one.length, "left") - first, 0)
    i = np.repeat(np.arange(len(matches)), matches)
    j = np.arange(len(i)) + np.repeat(first - np.cumsum(matches) + matches, matches)
    start = np.maximum(one.start[i], other.start[j])
    length = np.minimum(one.start[i] + one.length[i], other.start[j] + other.length[j]) - start
    return Common(
        one.offset[i] + start - one.start[i], other.offset[j] + start - other.start[j], length
    )
