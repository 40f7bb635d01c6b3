"""The state of a rank that checkpoints save, and the layout of an optimizer's buffers."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from mpitrain.layers.flat import Entry, Storage
from mpitrain.optim.rule import ElementsOf, Shape, elements
from mpitrain.regions import Piece, overlap
from mpitrain.transport.base import Transport


class FactSums(NamedTuple):
    """The all-reduce of a tensor-wise rule's facts, such as squared norms of tensors (rule.py).

    It runs over the ranks with other elements of the same tensors. Ranks with the same elements add
    in the same order.

    bind    (vector) -> run; collective. The vector is (count,) float64 in the memory of the backend.
            `run`, which is collective as well, replaces the vector by the sum.
    counts  (`Parameter.holders` of a tensor) -> whether this rank adds the terms of its elements.
            If several of these ranks have the same elements, one rank adds them.
    shards  the ranks among which ZeRO divides tensors; None: ZeRO divides none
    """

    bind: Callable[[Any], Callable[[], None]]
    counts: Callable[[str], bool]
    shards: Transport | None = None


ALONE = FactSums(lambda vector: lambda: None, lambda holders: True)
"""The `FactSums` of a rank that has all elements of its tensors."""


def laid_out(entries: Iterable[Entry], shape: Shape, start: int = 0) -> list[Entry]:
    """Return the layout of a buffer with an array of this shape for each tensor, from `start` on."""
    layout: list[Entry] = []
    for entry in entries:
        dims = shape(entry.parameter)
        if dims is not None:
            whole = entry.parameter._replace(shape=dims, slices=None)
            layout.append(Entry(entry.name, whole, entry.unit, start))
            start = layout[-1].stop
    return layout


def touched(storage: Storage, piece: Piece) -> list[Entry]:
    """Return the tensors with elements in a piece."""
    return [entry for entry in storage.entries if overlap(entry, piece)]


class StateBuffer(NamedTuple):
    """An array of a rank that checkpoints save, and into which loading writes.

    name     "parameters", "residual", or an optimizer buffer such as "first_moment"
    array    1-D, in the memory of the backend
    pieces   runs of the flat buffer and their offsets in `array`; may be empty
    kind     "agreed": equal on all ranks that store the same elements of a tensor
             "own": different on each rank; a new number of replicas preserves the sum over ranks
             "mean": different on each rank; a new number of replicas, or an "agreed" buffer of the
                     same name, starts from the mean over ranks
             "bound": valid only for the same rank of the same layout; other layouts start it anew
    needed   whether loading fails if the checkpoint lacks this "agreed" buffer;
             otherwise the buffer starts as in a new run
    like     name of an "agreed" buffer whose copy this buffer is at first, if the checkpoint lacks
             this buffer, or has it "bound" to another layout
    entries  the tensors in `array`, if they are not those of the flat buffer; `pieces` then refers
             to `array`
    """

    name: str
    array: Any
    pieces: Sequence[Piece] = ()
    kind: Literal["agreed", "own", "mean", "bound"] = "agreed"
    needed: bool = True
    like: str = ""
    entries: Sequence[Entry] = ()

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements in files: float32 for 16 bits, which not all tools read."""
        is_half = self.array.dtype.itemsize == 2 and self.array.dtype.kind in "fV"
        return np.dtype(np.float32) if is_half else self.array.dtype


class StateLayout(NamedTuple):
    """The layout of a buffer of optimizer state.

    length           elements of the buffer
    pieces, entries  as in `StateBuffer`
    tensors          {tensor: (offset, shape of its view)}; None: the buffer has one element for
                     each element of the pieces, in their order
    """

    length: int
    pieces: Sequence[Piece]
    entries: Sequence[Entry] = ()
    tensors: Mapping[str, tuple[int, tuple[int, ...]]] | None = None

    def views(self, buffer: Any) -> dict[str, Any]:
        """Return {tensor: its view of a buffer}; empty if `tensors` is None."""
        return {
            name: buffer[start : start + math.prod(shape)].reshape(shape)
            for name, (start, shape) in (self.tensors or {}).items()
        }


def layout_of(shape: Shape, storage: Storage, pieces: Sequence[Piece]) -> StateLayout:
    if shape is elements:
        return StateLayout(sum(piece.stop - piece.start for piece in pieces), pieces)
    if isinstance(shape, ElementsOf):
        return _elements_of(shape, storage, pieces)
    own = {entry.name: entry for piece in pieces for entry in touched(storage, piece)}
    entries = laid_out(own.values(), shape)
    count = entries[-1].stop if entries else 0
    tensors = {entry.name: (entry.start, entry.parameter.shape) for entry in entries}
    return StateLayout(count, [Piece(0, count, 0)], entries, tensors)


def _elements_of(shape: ElementsOf, storage: Storage, pieces: Sequence[Piece]) -> StateLayout:
    by_tensor, length = dict[str, Piece](), 0
    for piece in pieces:
        for entry in touched(storage, piece):
            if shape(entry.parameter) is not None:
                both = overlap(entry, piece)
                by_tensor[entry.name] = Piece(both.start, both.stop, length)
                length += len(both)
    tensors = {name: (own.offset, (own.stop - own.start,)) for name, own in by_tensor.items()}
    return StateLayout(length, list(by_tensor.values()), tensors=tensors)
