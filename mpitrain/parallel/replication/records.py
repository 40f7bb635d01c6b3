"""The input and the result of the end of a training step."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class StepInput(NamedTuple):
    """What a rank brings to the end of a step, when its backward pass is done.

    number of the step, from 0
    losses of its micro-batches, perhaps an array on the device, which may still compute it; none if others tell them
    lr     learning rate
    stop   whether this rank was asked to stop
    weights what each loss is multiplied by; none: 1
    """

    number: int
    losses: Any
    lr: float
    stop: bool = False
    weights: Sequence[float] = ()

    @property
    def loss(self) -> float:
        """This rank's part of the mean loss over the global batch; waits for the device."""
        weights = self.weights or [1.0] * len(self.losses)
        return sum(weight * float(loss) for weight, loss in zip(weights, self.losses, strict=False))


class StepResult(NamedTuple):
    """What every rank knows after a step: the same values on all of them, but for comm_s and ended.

    Workers that train apart know loss and grad_norm of their own alone, until a period ends.

    loss       mean over the global batch
    grad_norm  global 2-norm of the gradient, before clipping
    nonfinite  gradient elements that are infinite or NaN
    lr         learning rate of the step
    updated    whether the parameters were updated
    stop       whether any rank was asked to stop
    comm_s     seconds this rank stood still for messages in the step: communication that nothing hid
    lead       of asynchronous servers: steps that a worker was ahead of the last one when it began this step, at most
    staleness  of asynchronous servers: updates applied between a gradient's pull and its push, at most
    loss_scale of float16: by which this step's loss was multiplied
    overflows  of float16: steps in a row, this one included, that were skipped for gradients beyond it under a finite loss
    ended      of asynchronous pipelines, which know of a step some steps later: this rank's `perf_counter` when it had done it
    """

    loss: float
    grad_norm: float
    nonfinite: int
    lr: float
    updated: bool
    stop: bool
    comm_s: float = 0.0
    lead: int = 0
    staleness: int = 0
    loss_scale: float = 1.0
    overflows: int = 0
    ended: float | None = None


def outcome_of(mine: StepInput, totals: Sequence[float], comm_s: float) -> StepResult:
    """The outcome of a step; the parameters are updated if loss and norm are finite.

    totals  over all ranks: loss, sum of squares, elements that are not finite, requests to stop
    """
    loss, squares, nonfinite, stop = totals
    norm = math.sqrt(squares) if squares >= 0 else math.nan
    return StepResult(
        loss,
        norm,
        int(nonfinite),
        mine.lr,
        math.isfinite(loss) and math.isfinite(norm),
        stop > 0,
        comm_s,
    )


def clipping(clip: float, norm: float) -> float:
    """What gradients of this norm are multiplied by, so that none is longer than `clip`; 0: whatever the norm, 1."""
    return clip / norm if 0 < clip < norm else 1.0
