"""The optimizer of a rank: the state of an update rule, and updates over pieces of a flat buffer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpitrain import config
from mpitrain.layers.flat import Entry, Piece, Storage
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import Backend
from mpitrain.ops import Ops
from mpitrain.optim.elements import ElementUpdates
from mpitrain.optim.rule import ElementWise, Update, Views, elements
from mpitrain.optim.rules import RULES
from mpitrain.optim.tensors import (
    ALONE,
    FactSums,
    TensorUpdates,
    laid_out,
    touched,
)


class StateArray(NamedTuple):
    """A buffer of the state as checkpoints describe it.

    pieces   its elements in the flat buffer, or in the buffer that `entries` lay out
    entries  whole tensors in the buffer, if they are not those of the flat buffer
    """

    name: str
    array: Any
    pieces: Sequence[Piece]
    entries: Sequence[Entry] = ()


class Optimizer:
    """An update rule over the pieces of a flat buffer that a rank owns (as torch.optim.Optimizer).

    pieces   pieces to update
    state    {name: buffer}. A buffer of `elements` is as long as the pieces together: its element
             `piece.place` belongs to element `piece.start` of the flat buffer. Any other buffer has
             a whole array for each tensor with an element in the pieces.
    """

    def __init__(
        self,
        settings: config.Optimizer,
        storage: Storage,
        pieces: Sequence[Piece],
        ops: Ops,
        backend: Backend,
        arena: Arena,
        sums: FactSums = ALONE,
    ):
        """Allocate the state; collective with a tensor-wise rule.

        sums  sums over the ranks with other elements of the same tensors
        """
        self.settings, self.pieces, self._ops, self._arena = settings, list(pieces), ops, arena
        rule = RULES[settings.name]
        length = sum(piece.stop - piece.start for piece in pieces)
        own = {e.name: e for piece in pieces for e in touched(storage, piece)}.values()
        self._layouts = {
            name: laid_out(own, shape)
            for name, shape in rule.state.items()
            if shape is not elements
        }
        self.state = {
            name: backend.zeros(
                sum(entry.stop - entry.start for entry in self._layouts[name])
                if name in self._layouts
                else length,
                storage.dtype,
            )
            for name in rule.state
        }
        self._updates: ElementUpdates | TensorUpdates
        if isinstance(rule.step, ElementWise):
            self._updates = ElementUpdates(rule.step, storage, pieces, self.state, ops)
        else:
            self._updates = TensorUpdates(
                rule.step, storage, pieces, self.state, self._layouts, backend, sums
            )

    def arrays(self) -> list[StateArray]:
        """Return all buffers of the state, for checkpoints."""
        return [
            StateArray(
                name,
                array,
                [Piece(0, array.size, 0)] if name in self._layouts else self.pieces,
                self._layouts.get(name, ()),
            )
            for name, array in self.state.items()
        ]

    def sum_facts(
        self, views: Views, scale: float, lr: float, step: int, delayed: bool = False
    ) -> None:
        """Sum over whole tensors, before the first `update` of a step; collective.

        An element-wise rule sums nothing.
        views  (piece) -> its parameters and gradients; the other arguments as in `update`
        """
        self._updates.sum_facts(views, self._update(scale, lr, step, delayed))

    def update(
        self,
        piece: Piece,
        parameters: Any,
        gradients: Any,
        scale: float,
        lr: float,
        step: int,
        delayed: bool = False,
        mirror: Any = None,
    ) -> None:
        """Update the parameters of a piece in place with scale x its gradients.

        parameters  as long as the piece
        gradients   as long as the piece
        step        number of earlier updates
        delayed     whether some of these gradients belong to earlier steps, and some of this step's
                    gradients arrive later
        mirror      as long as the piece; receives the rounded parameters in the same pass;
                    None: there is no mirror
        """
        update = self._update(scale, lr, step, delayed)
        self._updates.update(piece, parameters, gradients, mirror, update)

    def _update(self, scale: float, lr: float, step: int, delayed: bool) -> Update:
        return Update(self.settings, self._ops, self._arena, scale, lr, step + 1, delayed)
