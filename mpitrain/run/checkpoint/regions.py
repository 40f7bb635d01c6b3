"""Regions of tensors: the mapping between the elements of a whole tensor and a rank's array.

A `Region` is the compact form, which the manifest stores as text. It has the rectangles of a
tensor on a rank, and ranges of their flattened elements. `Runs` are the same elements as runs in
the flattened whole tensor. The runs of two layouts are intersected to load a checkpoint.

Example: the right half of a tensor of shape (3, 6), on rank 1 of 2 tensor-parallel ranks. Its
rectangle is ((0, 3), (3, 6)). The numbers are offsets in the flattened whole tensor:

    whole tensor          array of the rank       Runs
    .  .  .   3  4  5      3  4  5                start  3, offset 0, length 3
    .  .  .   9 10 11      9 10 11                start  9, offset 3, length 3
    .  .  .  15 16 17     15 16 17                start 15, offset 6, length 3
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpitrain.layers.flat import Entry, Storage
from mpitrain.optim.optimizer import StateBuffer
from mpitrain.regions import Piece, Runs, one_run, within

PARAMETERS = "parameters"
"""The name of the `StateBuffer` that is written as whole tensors."""

Rectangles = tuple[tuple[tuple[int, int], ...], ...]
"""The rectangles of `Parameter.slices`, each slice as (start, stop): [rectangle][dim]."""


class Region(NamedTuple):
    """A subset of the elements of one whole tensor, and its mapping to an array.

    tensor      full name; empty for an array outside of a flat buffer, which is a tensor itself
    shape       of the whole tensor
    rectangles  the rectangles of the tensor on the rank, joined as in `Parameter`; None: the whole
    pieces      ranges of the elements of the joined rectangles, flattened, with their offsets
                in the array
    """

    tensor: str
    shape: tuple[int, ...]
    rectangles: Rectangles | None
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    def packed(self) -> "Region":
        """Return the region of the same elements in an array without any others."""
        pieces, offset = [], 0
        for piece in self.pieces:
            pieces.append(piece._replace(offset=offset))
            offset += piece.stop - piece.start
        return self._replace(pieces=tuple(pieces))


class HeldRegion(NamedTuple):
    """A region of a tensor in the array of a `StateBuffer` on one rank.

    number             index of the `StateBuffer` in its list
    name, kind, dtype  from the `StateBuffer`
    part               the region
    """

    number: int
    name: str
    kind: str
    dtype: np.dtype
    part: Region


def part_of_text(listed: Sequence[Any]) -> Region:
    """Parse a region from the JSON of a manifest."""
    tensor, shape, rectangles, pieces = listed
    whole = rectangles and tuple(
        tuple((start, stop) for start, stop in rectangle) for rectangle in rectangles
    )
    return Region(tensor, tuple(shape), whole, tuple(Piece(*piece) for piece in pieces))


def described(storage: Storage, kept: Sequence[StateBuffer]) -> dict[str, Any]:
    """Describe the state of this rank as JSON; all ranks gather it and parse it by `holdings`."""
    return {
        "tensors": _tensors(storage.entries),
        "kept": [
            [k.name, k.kind, k.dtype.name, k.array.size, k.pieces, _tensors(k.entries)]
            for k in kept
        ],
    }


def _tensors(entries: Sequence[Entry]) -> list[list[Any]]:
    return [
        [
            e.name,
            e.parameter.shape,
            e.parameter.slices
            and [[[s.start, s.stop] for s in rectangle] for rectangle in e.parameter.slices],
            e.start,
            e.stop,
        ]
        for e in entries
    ]


def holdings(description: dict[str, Any]) -> list[HeldRegion]:
    """Return the regions of all tensors on a rank, from the JSON of its `described`."""
    regions = []
    for number, (name, kind, dtype, size, pieces, own) in enumerate(description["kept"]):
        tensors = (own or description["tensors"]) if pieces else [("", [size], None, 0, size)]
        everything = sorted(Piece(*piece) for piece in pieces or [(0, size, 0)])
        starts, stops = [piece.start for piece in everything], [piece.stop for piece in everything]
        for tensor, shape, rectangles, start, stop in tensors:
            near = everything[bisect_right(stops, start) : bisect_left(starts, stop)]
            if inside := list(within(near, start, stop)):
                local = [
                    [piece.start - start, piece.stop - start, piece.offset] for piece in inside
                ]
                regions.append(
                    HeldRegion(
                        number,
                        name,
                        kind,
                        np.dtype(dtype),
                        part_of_text([tensor, shape, rectangles, local]),
                    )
                )
    return regions


def runs(part: Region) -> Runs:
    """Return the runs of a region; a rectangle narrower than its tensor has one run per row."""
    start, offset, length = _runs_of_rectangles(part.shape, part.rectangles)
    triples = []
    for piece in part.pieces:
        low, high = np.maximum(offset, piece.start), np.minimum(offset + length, piece.stop)
        is_inside = low < high
        low = low[is_inside]
        triples.append(
            (
                start[is_inside] + low - offset[is_inside],
                piece.offset + low - piece.start,
                high[is_inside] - low,
            )
        )
    firsts, places, lengths = (np.concatenate(column) for column in zip(*triples, strict=True))
    order = np.argsort(firsts, kind="stable")
    return Runs(firsts[order], places[order], lengths[order])


def joined_dim(rectangles: Sequence[Sequence[Any]]) -> int:
    """Return the one dim in which rectangles differ, along which they are joined; 0: none."""
    first = rectangles[0]
    return next((d for r in rectangles for d in range(len(r)) if r[d] != first[d]), 0)


def _runs_of_rectangles(
    shape: Sequence[int], rectangles: Rectangles | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the runs of whole rectangles as three arrays, (runs,) int64 each: offsets in the
    flattened tensor, offsets in the flattened local tensor, lengths.
    """
    if rectangles is None:
        return one_run(0, prod(shape))
    dims = range(len(shape))
    lengths = [[stop - start for start, stop in rectangle] for rectangle in rectangles]
    joined = joined_dim(rectangles)
    local = [sum(length[d] for length in lengths) if d == joined else lengths[0][d] for d in dims]
    triples, before = [], 0
    for rectangle, length in zip(rectangles, lengths, strict=True):
        last = max((d for d in dims if not shape[d] == local[d] == length[d]), default=0)
        start, offset = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for d in dims:
            steps = np.arange(length[d] if d < last else 1)
            start = np.add.outer(start, (rectangle[d][0] + steps) * prod(shape[d + 1 :])).reshape(
                -1
            )
            offset = np.add.outer(
                offset, (before * (d == joined) + steps) * prod(local[d + 1 :])
            ).reshape(-1)
        triples.append((start, offset, np.full(len(start), prod(length[last:]))))
        before += length[joined]
    first, second, third = (np.concatenate(column) for column in zip(*triples, strict=True))
    return first, second, third
