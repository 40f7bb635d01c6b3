"""Learning-rate schedules: a linear warm-up, then a decay."""

import math

from mpitrain import config


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
