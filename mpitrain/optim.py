"""Learning-rate schedules, and the update rules applied to runs of flat buffers."""

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
"""The buffers each rule keeps beside the parameters."""


def learning_rate(settings: config.Optimizer, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up, then the schedule down to a tenth of the peak."""
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
    """One update rule over the pieces of a flat buffer that a rank owns.

    pieces   what it updates; together as long as each buffer of its state
    state    {name: compact buffer}: element `place` of a piece belongs to element `start` of the flat buffer
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
        """Update the parameters of a piece in place from scale x its gradients; both are as long as the piece.

        step     of the updates that were made, from 0
        mirror   as long: what becomes the parameters rounded, in the same pass; frozen tensors' part stays; None: there is none
        delayed  whether part of these gradients is of earlier steps, and part of this step's will come later
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
