"""Element-wise updates: one operation over the runs of each piece."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mpitrain import config
from mpitrain.layers.flat import Storage
from mpitrain.ops import Ops
from mpitrain.ops.bodies import GroupRun, over_runs
from mpitrain.optim.groups import group_of
from mpitrain.optim.rule import ElementWise, Update, Views
from mpitrain.regions import Piece


class ElementUpdates:
    """Updates of an element-wise rule over the pieces of a rank.

    state  buffers along the pieces, in the order of the operation's arguments
    """

    def __init__(
        self,
        step: ElementWise,
        settings: config.Optimizer,
        storage: Storage,
        pieces: Sequence[Piece],
        state: Mapping[str, Any],
        ops: Ops,
    ):
        self._arguments, self._state = step.arguments, list(state.values())
        groups, operation = partial(group_of, settings), getattr(ops, step.op)
        self._steps = {
            piece: over_runs(
                operation,
                [
                    GroupRun(run.start - piece.start, run.stop - piece.start, *run.key)
                    for run in storage.runs(piece.start, piece.stop, groups)
                ],
            )
            for piece in pieces
        }

    def sum_facts(self, views: Views, update: Update) -> None:
        """Do nothing: no element depends on another one."""

    def update(
        self, piece: Piece, parameters: Any, gradients: Any, mirror: Any, update: Update
    ) -> None:
        """Update the parameters of a piece in place."""
        along = slice(piece.offset, piece.offset + piece.stop - piece.start)
        self._steps[piece](
            parameters,
            gradients,
            *(buffer[along] for buffer in self._state),
            scale=update.scale,
            lr=update.lr,
            arena=update.arena,
            mirror=mirror,
            **self._arguments(update),
        )
