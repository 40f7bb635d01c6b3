"""The items of the training state that checkpoints save, and views of pieces of flat buffers."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from mpitrain.layers.flat import Entry
from mpitrain.optim.state import StateArray
from mpitrain.regions import Piece


class StateBuffer(NamedTuple):
    """An array of this rank that checkpoints save, and into which loading writes.

    name    "parameters", "residual", or an optimizer buffer such as "first_moment"
    array   1-D, in the memory of the backend
    pieces  elements of the flat buffer and their offsets in `array`; may be empty
    kind    "agreed": equal on all ranks that store the same elements of a tensor
            "own": different on each rank; a new number of replicas preserves the sum over ranks
            "mean": different on each rank; a new number of replicas, or an "agreed" buffer of that
                    name, starts from the mean over ranks
            "bound": valid only for the same rank of the same layout; other layouts start it anew
    needed  whether loading fails if the checkpoint lacks this "agreed" buffer;
            otherwise the buffer starts as in a new run
    like    name of an "agreed" buffer: this one starts as a copy of it if the checkpoint lacks this
            one, or has it "bound" to another layout
    entries whole tensors in a buffer of their own, which `pieces` then refer to; empty: the tensors
            of the flat buffer
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

    @classmethod
    def of(cls, state: StateArray) -> "StateBuffer":
        """Return a buffer of an optimizer's state."""
        return cls(state.name, state.array, state.pieces, entries=state.entries)


def spread(flat: Any, pieces: Sequence[Piece]) -> list[Any]:
    """Return views of the pieces in a full-size flat buffer, at their `start`."""
    return [flat[piece.start : piece.stop] for piece in pieces]


def compact(flat: Any, pieces: Sequence[Piece]) -> list[Any]:
    """Return views of the pieces in their owner's compact buffer, at their `offset`."""
    return [flat[piece.offset : piece.offset + piece.stop - piece.start] for piece in pieces]
