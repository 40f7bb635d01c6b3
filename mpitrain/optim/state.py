"""The layouts of an optimizer's state buffers on a rank, and their descriptions for checkpoints."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpitrain.layers.flat import Entry, Storage
from mpitrain.optim.rule import ElementsOf, Shape, elements
from mpitrain.optim.tensors import laid_out, touched
from mpitrain.regions import Piece, overlap


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
    """Return the layout of a buffer of the state for the pieces of a rank."""
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
    """Return the layout of the elements of some tensors in the pieces, one after the other."""
    by_tensor, length = dict[str, Piece](), 0
    for piece in pieces:
        for entry in touched(storage, piece):
            if shape(entry.parameter) is not None:
                both = overlap(entry, piece)
                by_tensor[entry.name] = Piece(both.start, both.stop, length)
                length += len(both)
    tensors = {name: (own.offset, (own.stop - own.start,)) for name, own in by_tensor.items()}
    return StateLayout(length, list(by_tensor.values()), tensors=tensors)
