"""The buffers of an optimizer's state on a rank: their layout, and their descriptions for checkpoints."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpitrain.layers.flat import Entry, Storage
from mpitrain.optim.rule import ElementsOf, Shape, elements
from mpitrain.regions import Piece, overlap
from mpitrain.transport.base import Transport


class FactSums(NamedTuple):
    """The all-reduce of a tensor-wise rule's facts, such as squared norms of tensors (rule.py). It
    runs over the ranks with other elements of the same tensors.

    The order of additions is the same for all ranks with the same elements.

    bind    (vector) -> run; collective. The vector is (count,) float64 in the memory of the backend.
            `run` leaves the sum in it, and is collective as well.
    counts  (holders, as `Parameter.holders`) -> whether the sum includes this rank's elements of
            such tensors. If the sum runs over ranks with the same elements, one of them counts.
    shards  the ranks of the tensor's other elements if ZeRO divides it; None: nothing is divided
    """

    bind: Callable[[Any], Callable[[], None]]
    counts: Callable[[str], bool]
    shards: Transport | None = None


ALONE = FactSums(lambda vector: lambda: None, lambda holders: True)
"""The sums of a rank that updates whole tensors by itself."""


def laid_out(entries: Iterable[Entry], shape: Shape, start: int = 0) -> list[Entry]:
    """Lay out a whole array of this shape for each tensor, one after the other from `start` on."""
    layout: list[Entry] = []
    for entry in entries:
        dims = shape(entry.parameter)
        if dims is not None:
            whole = entry.parameter._replace(shape=dims, slices=None)
            layout.append(Entry(entry.name, whole, entry.unit, start))
            start = layout[-1].stop
    return layout


def touched(storage: Storage, piece: Piece) -> list[Entry]:
    return [entry for entry in storage.entries if overlap(entry, piece)]


class StateArray(NamedTuple):
    """A buffer of the optimizer state, as checkpoints describe it.

    pieces   this rank's ranges of the flat buffer, if each element belongs to one of its elements
    entries  otherwise the tensors in this buffer, each whole and with its offset; `pieces` are then
             ranges of this buffer
    """

    name: str
    array: Any
    pieces: Sequence[Piece]
    entries: Sequence[Entry] = ()


class StateLayout(NamedTuple):
    """The layout of a buffer of the state.

    length   elements of the buffer
    pieces   as in `StateArray`
    entries  as in `StateArray`
    tensors  {tensor: (offset, shape of its view)}; None: the buffer is along the pieces
    """

    length: int
    pieces: Sequence[Piece]
    entries: Sequence[Entry] = ()
    tensors: Mapping[str, tuple[int, tuple[int, ...]]] | None = None

    def views(self, buffer: Any) -> dict[str, Any]:
        """Return {tensor: its view} for a buffer that does not have the layout of the pieces."""
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
