"""Learning-rate schedules, and update rules of optimizers over runs of flat buffers."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from mpitrain import config
from mpitrain.layers.flat import Piece, Storage
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import Backend
from mpitrain.ops import Ops, Writes

STATE = {"sgd": (), "momentum": ("momentum",), "adamw": ("first_moment", "second_moment")}
"""State buffers of each update rule, besides the parameters."""


def learning_rate(settings: config.Optimizer, step: int, steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of `steps`.

    The schedule is a linear warm-up, then a constant rate or a decay to a tenth of the peak.
    """
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    progress = min(1.0, (step - settings.warmup) / max(1, steps - settings.warmup))
    share = {
        "constant": 1.0,
        "linear": 1.0 - 0.9 * progress,
        "cosine": 0.1 + 0.45 * (1 + math.cos(math.pi * progress)),
    }[settings.schedule]
    return settings.lr * share


class Optimizer:
    """Update rule over the pieces of a flat buffer that a rank owns.

    pieces   pieces to update; together as long as each buffer of the state
    state    {name: compact buffer}: its element `piece.place` belongs to element `piece.start` of
             the flat buffer
    """

    def __init__(
        self,
        settings: config.Optimizer,
        storage: Storage,
        pieces: Sequence[Piece],
        ops: Ops,
        backend: Backend,
        arena: Arena,
    ):
        self.settings, self.storage, self.pieces, self._ops, self._arena = (
            settings,
            storage,
            list(pieces),
            ops,
            arena,
        )
        length = sum(piece.stop - piece.start for piece in pieces)
        self.state = {name: backend.zeros(length, storage.dtype) for name in STATE[settings.name]}
        self._runs = {piece: list(storage.runs(piece.start, piece.stop)) for piece in pieces}

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
        mirror      as long as the piece; receives the rounded parameters in the same pass, without
                    those of frozen tensors; None: there is no mirror
        """
        s = self.settings
        beta1 = s.beta1_delayed if delayed else s.beta1
        rules: dict[str, Writes] = {
            "sgd": self._ops.sgd,
            "momentum": partial(self._ops.momentum, beta=s.momentum),
            "adamw": partial(
                self._ops.adamw, beta1=beta1, beta2=s.beta2, eps=s.epsilon, step=step + 1
            ),
        }
        rule = rules[s.name]
        for run in self._runs[piece]:
            here = slice(run.start - piece.start, run.stop - piece.start)
            kept = slice(piece.place + here.start, piece.place + here.stop)
            rule(
                parameters[here],
                gradients[here],
                *(buffer[kept] for buffer in self.state.values()),
                scale=scale,
                lr=lr,
                weight_decay=s.weight_decay if run.decayed else 0.0,
                arena=self._arena,
                **({} if mirror is None else {"mirror": mirror[here]}),
            )
