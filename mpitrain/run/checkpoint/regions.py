"""Which elements of which logical tensor lie where in an array, whatever the layout.

A `Region` is short and becomes text: the rectangles of a tensor that a rank holds, and ranges of their elements. `Runs` are
the same as neighbouring elements of the whole tensor, and are what two layouts are compared by.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpitrain.layers.flat import Piece, Storage
from mpitrain.parallel.replication.state import StateBuffer

Rectangles = tuple[tuple[tuple[int, int], ...], ...]
"""As `Parameter.slices`, with (start, stop) for each slice."""


class Region(NamedTuple):
    """Elements of one logical tensor.

    tensor      full name; empty for an array that is no part of a flat buffer, which is a tensor of its own
    shape       of the whole tensor
    rectangles  what of it the rank holds, joined as `Parameter` says; None for the whole
    pieces      which elements of these, flattened, lie where in the array at hand
    """

    tensor: str
    shape: tuple[int, ...]
    rectangles: Rectangles | None
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        """Its elements."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    def packed(self) -> "Region":
        """The same elements in an array that holds nothing else."""
        pieces, place = [], 0
        for piece in self.pieces:
            pieces.append(piece._replace(place=place))
            place += piece.stop - piece.start
        return self._replace(pieces=tuple(pieces))


class HeldRegion(NamedTuple):
    """A part of a tensor in an array of `StateBuffer`: the number of that in its list, and what it says of it."""

    number: int
    name: str
    kind: str
    dtype: np.dtype
    part: Region


class Runs(NamedTuple):
    """Neighbouring elements of a tensor, flattened row by row, that are neighbours in an array too.

    start   first of each run in the tensor, ascending: (runs,) int64, as the others
    place   where it lies in the array
    length  elements
    """

    start: np.ndarray
    place: np.ndarray
    length: np.ndarray


class Common(NamedTuple):
    """Runs that two `Runs` share: where each lies in the one's array and in the other's, ascending in the tensor."""

    one: np.ndarray
    other: np.ndarray
    length: np.ndarray


def part_of_text(listed: Sequence[Any]) -> Region:
    """A part that was text."""
    tensor, shape, rectangles, pieces = listed
    whole = rectangles and tuple(
        tuple((start, stop) for start, stop in rectangle) for rectangle in rectangles
    )
    return Region(tensor, tuple(shape), whole, tuple(Piece(*piece) for piece in pieces))


def described(storage: Storage, kept: Sequence[StateBuffer]) -> dict[str, Any]:
    """What a rank holds, as text that `holdings` reads: each tensor and each array once."""
    return {
        "tensors": [
            [
                e.name,
                e.parameter.shape,
                e.parameter.slices
                and [[[s.start, s.stop] for s in rectangle] for rectangle in e.parameter.slices],
                e.start,
                e.stop,
            ]
            for e in storage.entries
        ],
        "kept": [[k.name, k.kind, k.array.dtype.name, k.array.size, k.pieces] for k in kept],
    }


def holdings(description: dict[str, Any]) -> list[HeldRegion]:
    """Every part of a tensor that a rank holds."""
    found = []
    for number, (name, kind, dtype, size, pieces) in enumerate(description["kept"]):
        tensors = description["tensors"] if pieces else [("", [size], None, 0, size)]
        everything = sorted(Piece(*piece) for piece in pieces or [(0, size, 0)])
        starts, stops = [piece.start for piece in everything], [piece.stop for piece in everything]
        for tensor, shape, rectangles, start, stop in tensors:
            near = everything[bisect_right(stops, start) : bisect_left(starts, stop)]
            if inside := list(within(near, start, stop)):
                local = [[piece.start - start, piece.stop - start, piece.place] for piece in inside]
                found.append(
                    HeldRegion(
                        number,
                        name,
                        kind,
                        np.dtype(dtype),
                        part_of_text([tensor, shape, rectangles, local]),
                    )
                )
    return found


def within(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[Piece]:
    """What of the pieces lies within [start, stop)."""
    for piece in pieces:
        low, high = max(piece.start, start), min(piece.stop, stop)
        if low < high:
            yield Piece(low, high, piece.place + low - piece.start)


def without(pieces: Iterable[Piece], others: Iterable[Piece]) -> list[Piece]:
    """What of the pieces lies in none of the others."""
    left = list(pieces)
    for other in others:
        if all(other.stop <= piece.start or piece.stop <= other.start for piece in left):
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
    """The pieces in parts of at most `count` elements."""
    for piece in pieces:
        for start in range(piece.start, piece.stop, count):
            yield from within([piece], start, start + count)


def runs(part: Region) -> Runs:
    """The runs of a part: one for each row of a rectangle that is not as wide as its tensor."""
    start, place, length = _runs_of_rectangles(part.shape, part.rectangles)
    found = []
    for piece in part.pieces:
        low, high = np.maximum(place, piece.start), np.minimum(place + length, piece.stop)
        here = low < high
        low = low[here]
        found.append(
            (start[here] + low - place[here], piece.place + low - piece.start, high[here] - low)
        )
    firsts, places, lengths = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(firsts, kind="stable")
    return Runs(firsts[order], places[order], lengths[order])


def one_run(start: int, length: int, place: int = 0) -> Runs:
    """Neighbouring elements, as `Runs`."""
    return Runs(*(np.array([number], np.int64) for number in (start, place, length)))


def common(one: Runs, other: Runs) -> Common:
    """The elements in both."""
    first = np.searchsorted(other.start + other.length, one.start, "right")
    matches = np.maximum(np.searchsorted(other.start, one.start + one.length, "left") - first, 0)
    i = np.repeat(np.arange(len(matches)), matches)
    j = np.arange(len(i)) + np.repeat(first - np.cumsum(matches) + matches, matches)
    start = np.maximum(one.start[i], other.start[j])
    length = np.minimum(one.start[i] + one.length[i], other.start[j] + other.length[j]) - start
    return Common(
        one.place[i] + start - one.start[i], other.place[j] + start - other.start[j], length
    )


def _runs_of_rectangles(
    shape: Sequence[int], rectangles: Rectangles | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs of all that the rectangles hold: starts in the tensor, in what a rank holds of it (both flattened), lengths."""
    if rectangles is None:
        return one_run(0, prod(shape))
    dims = range(len(shape))
    lengths = [[stop - start for start, stop in rectangle] for rectangle in rectangles]
    joined = next((d for other in rectangles for d in dims if other[d] != rectangles[0][d]), 0)
    local = [sum(length[d] for length in lengths) if d == joined else lengths[0][d] for d in dims]
    found, before = [], 0
    for rectangle, length in zip(rectangles, lengths, strict=True):
        last = max((d for d in dims if not shape[d] == local[d] == length[d]), default=0)
        start, place = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for d in dims:
            steps = np.arange(length[d] if d < last else 1)
            start = np.add.outer(start, (rectangle[d][0] + steps) * prod(shape[d + 1 :])).reshape(
                -1
            )
            place = np.add.outer(
                place, (before * (d == joined) + steps) * prod(local[d + 1 :])
            ).reshape(-1)
        found.append((start, place, np.full(len(start), prod(length[last:]))))
        before += length[joined]
    first, second, third = (np.concatenate(column) for column in zip(*found, strict=True))
    return first, second, third
