"""Learning-rate schedules: a linear warm-up, a constant rate, and a decay at the end of the run."""

import math
from collections.abc import Callable
from typing import NamedTuple

from mpitrain import config


class Decay(NamedTuple):
    """The decay of a schedule.

    factor  (progress of the decay from 0 to 1, final) -> factor of the peak rate
    first   (warmup, steps) -> first step of the decay, if optimizer.decay_steps is 0
    """

    factor: Callable[[float, float], float]
    first: Callable[[int, int], int]


def _linear(progress: float, final: float) -> float:
    return 1.0 - (1 - final) * progress


def _cosine(progress: float, final: float) -> float:
    return final + (1 - final) / 2 * (1 + math.cos(math.pi * progress))


def _after_warmup(warmup: int, steps: int) -> int:
    return warmup


def _last_fifth(warmup: int, steps: int) -> int:
    """Return the start of the decay that Hägele et al. 2024 (arXiv:2405.18392) find sufficient."""
    return steps - steps // 5


DECAYS: dict[str, Decay | None] = {
    "constant": None,
    "linear": Decay(_linear, _after_warmup),
    "cosine": Decay(_cosine, _after_warmup),
    "wsd": Decay(_linear, _last_fifth),
}
"""{optimizer.schedule: its decay}; None: no decay. wsd is warm-up, stable, decay (Hu et al. 2024,
MiniCPM, arXiv:2404.06395).
"""


def learning_rate(settings: config.Optimizer, step: int, steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of `steps`.

    The decay ends with the run, at optimizer.final times the peak.
    """
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    decay = DECAYS[settings.schedule]
    if not decay:
        return settings.lr
    length = settings.decay_steps
    first = steps - length if length else decay.first(settings.warmup, steps)
    first = max(first, settings.warmup)
    progress = min(1.0, max(0, step - first) / max(1, steps - first))
    return settings.lr * decay.factor(progress, settings.final)
