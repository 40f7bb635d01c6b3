"""The input and the result at the end of a training step."""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple


class StepInput(NamedTuple):
    """One rank's input to `Replication.finish`, after its backward pass.

    number   of the step, from 0
    losses   summed losses of its micro-batches, perhaps an array that the device still computes;
             empty if other ranks report the loss
    lr       learning rate
    stop     whether this rank has received a request to stop
    weights  factor of each loss; empty: 1 each
    """

    number: int
    losses: Any
    lr: float
    stop: bool = False
    weights: Sequence[float] = ()

    @property
    def loss(self) -> float:
        """This rank's summand of the mean loss over the global batch. The first read waits for the
        device.
        """
        weights = self.weights or [1.0] * len(self.losses)
        return sum(weight * float(loss) for weight, loss in zip(weights, self.losses, strict=False))


class StepResult(NamedTuple):
    """The result of a training step, equal on all ranks except for `comm_s` and `ended`.

    With local SGD and gossip, loss and grad_norm are the worker's own until the end of a period.

    loss        mean over the global batch
    grad_norm   2-norm of the global gradient, before clipping
    nonfinite   gradient elements that are infinite or NaN
    lr          learning rate of the step
    updated     whether the parameters were updated
    stop        whether any rank has received a request to stop
    comm_s      seconds that this rank was blocked on communication in the step: the exposed, not
                overlapped, communication
    lead        asynchronous servers: the largest number of steps by which a worker was ahead of the
                last one when it began the step
    staleness   asynchronous servers: the largest number of updates between a gradient's pull and
                its push
    loss_scale  float16: factor of this step's loss
    overflows   float16: consecutive skipped steps, this one included, whose gradients overflowed
                under a finite loss
    ended       asynchronous pipelines: this rank's `perf_counter` at the end of the step, which all
                ranks learn some steps later
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


class ExposedTime:
    """The seconds that a rank is blocked on communication; as a context, it adds its duration."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._began

    def take(self) -> float:
        """Return the seconds since the last call of this method."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def outcome_of(mine: StepInput, totals: Sequence[float], comm_s: float = 0.0) -> StepResult:
    """Return the result of a step; its `updated` is true if loss and norm are finite.

    totals  over all ranks: loss, sum of squares, non-finite elements, requests to stop
    comm_s  seconds that this rank was blocked on communication
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
    """Return the factor that clips a gradient of this norm (as torch.nn.utils.clip_grad_norm_).

    clip  largest norm; 0: do not clip, the factor is 1
    """
    return clip / norm if 0 < clip < norm else 1.0
