"""Learning-rate schedules, and the update rules applied to runs of flat buffers."""

import math
from functools import partial
from typing import Any

from mpitrain import config
from mpitrain.layers.flat import Storage
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import Backend
from mpitrain.ops import Ops, Writes

STATE = {"sgd": (), "momentum": ("momentum",), "adamw": ("first_moment", "second_moment")}
"""The flat buffers each rule keeps beside the parameters."""


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
    """One update rule over flat buffers; `state` maps a name to a buffer like the parameters'."""

    def __init__(self, settings: config.Optimizer, storage: Storage, ops: Ops, backend: Backend, arena: Arena):
        self.settings, self.storage, self._ops, self._arena = settings, storage, ops, arena
        self.state = {name: backend.zeros(storage.length, storage.dtype) for name in STATE[settings.name]}

    def update(self, parameters: Any, gradients: Any, scale: float, lr: float, step: int,
               start: int = 0, stop: int | None = None, delayed: bool = False) -> None:
        """Update parameters[start:stop] in place from scale x gradients[start:stop].

        step     from 0
        delayed  whether part of these gradients is of earlier steps, and part of this step's will come later
        """
        s = self.settings
        beta1 = s.beta1_delayed if delayed else s.beta1
        rules: dict[str, Writes] = {
            "sgd": self._ops.sgd,
            "momentum": partial(self._ops.momentum, beta=s.momentum),
            "adamw": partial(self._ops.adamw, beta1=beta1, beta2=s.beta2, eps=s.epsilon, step=step + 1),
        }
        rule = rules[s.name]
        for run in self.storage.runs(start, self.storage.length if stop is None else stop):
            here = slice(run.start, run.stop)
            buffers = [buffer[here] for buffer in (parameters, gradients, *self.state.values())]
            rule(*buffers, scale=scale, lr=lr, weight_decay=s.weight_decay if run.decayed else 0.0, arena=self._arena)
