"""The input and the result of a training step, its control message, and the loss scale."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.group import Group


class StepInput(NamedTuple):
    """One rank's input to `Replication.finish`, after its backward pass.

    number   of the step, from 0
    losses   summed losses of its micro-batches, perhaps an array that the device still computes;
             empty if other ranks report the loss
    lr       learning rate
    stop     whether this rank has received a request to stop
    weights  factor of each loss; empty: 1 each
    ignored  targets of its rows that do not count; 0 if other ranks report the loss
    targets  all targets of the update, over all ranks; the weights divide by them
    """

    number: int
    losses: Any
    lr: float
    stop: bool = False
    weights: Sequence[float] = ()
    ignored: int = 0
    targets: int = 1

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

    loss        mean over the targets of the global batch that count
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
    counted     the targets that count, as a fraction of all targets of the update; the update is
                skipped if it is 0
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
    counted: float = 1.0
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


def weight_of(targets: int) -> float:
    """Return the weight of each of an update's targets in the mean: the factor of a summed loss.

    `mean_of` divides by the fraction that counts, when all ranks know the ignored targets. Nothing
    else divides a gradient.
    """
    return 1 / targets


class Mean(NamedTuple):
    """The loss and gradient of an update, as means over the targets that count.

    loss     NaN if no target counts
    norm     of the mean gradient, before clipping; NaN if no target counts
    counted  the targets that count, as a fraction of all; exactly 1 if none is ignored
    factor   of the summed gradient, for the update: divides and clips it
    """

    loss: float
    norm: float
    counted: float
    factor: float


def mean_of(
    loss: float,
    squares: float,
    ignored: float,
    targets: int,
    loss_scale: float = 1.0,
    clip: float = 0.0,
) -> Mean:
    """Divide the sums of an update, whose losses already have the weight `weight_of(targets)`.

    squares  sum of squares of the summed gradient, which has the factor `loss_scale`
    ignored  targets that do not count
    clip     largest norm (as torch.nn.utils.clip_grad_norm_); 0: do not clip
    """
    counted = (targets - ignored) / targets if ignored else 1.0
    if not counted:
        return Mean(math.nan, math.nan, 0.0, 0.0)
    norm = math.sqrt(squares) / loss_scale / counted if squares >= 0 else math.nan
    clipping = clip / norm if 0 < clip < norm else 1.0
    return Mean(loss / counted, norm, counted, clipping / loss_scale / counted)


def outcome_of(
    step_input: StepInput, totals: Sequence[float], skips: "SkippedUpdates", clip: float
) -> tuple[StepResult, float]:
    """Return the result of a step, and the factor of the summed gradient for its update.

    `updated` is true if loss and norm are finite.

    totals  over all ranks: loss, sum of squares, non-finite elements, requests to stop, ignored
            targets
    """
    loss, squares, nonfinite, stop, ignored = totals
    mean = mean_of(loss, squares, ignored, step_input.targets, skips.scale.value, clip)
    return StepResult(
        mean.loss,
        mean.norm,
        int(nonfinite),
        step_input.lr,
        math.isfinite(mean.loss) and math.isfinite(mean.norm),
        stop > 0,
        counted=mean.counted,
    ), mean.factor


class ControlMessage:
    """The sum of up to five numbers over all ranks, by a small all-reduce in host memory."""

    def __init__(self, world: Group):
        """Bind the all-reduce; collective."""
        self._numbers = np.zeros(5)
        self._sum = world.bind(self._numbers)

    def total(self, *numbers: float) -> list[float]:
        """Return the sum of each number over all ranks; collective."""
        self._numbers[:] = 0
        self._numbers[: len(numbers)] = numbers
        self._sum.run()
        return self._numbers[: len(numbers)].tolist()


class LossScale:
    """The constant loss scale 1, for dtypes with the range of float32."""

    value = 1.0

    def after(self, outcome: StepResult) -> StepResult:
        """Adapt the scale to a step's result, and return the result with the scale's fields filled.

        All ranks pass the same result and so end with the same scale.
        """
        return outcome

    def numbers(self) -> dict[str, float]:
        """Return the numbers that a checkpoint saves."""
        return {}

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Continue from the numbers of a checkpoint; from the initial scale if there are none."""


class DynamicLossScale(LossScale):
    """The dynamic loss scale of float16: it doubles after GOOD steps without overflow, and halves
    on overflow.

    An overflow is a gradient that is not finite although its loss is. The step is skipped, and the
    run continues.

    value      current factor of the loss
    good       steps without overflow since the value changed
    overflows  consecutive steps with an overflow
    source     Micikevicius et al. 2018, Mixed Precision Training, ICLR, section 3.2
    """

    FIRST, LEAST, MOST, GOOD = 2.0**16, 1.0, 2.0**24, 200

    def __init__(self) -> None:
        self.value, self.good, self.overflows = self.FIRST, 0, 0

    def after(self, outcome: StepResult) -> StepResult:
        value = self.value
        if not math.isfinite(outcome.loss):
            return outcome._replace(loss_scale=value)
        if outcome.updated:
            self.good, self.overflows = self.good + 1, 0
            if self.good == self.GOOD:
                self.value, self.good = min(2 * value, self.MOST), 0
        else:
            self.value, self.good, self.overflows = (
                max(value / 2, self.LEAST),
                0,
                self.overflows + 1,
            )
        return outcome._replace(loss_scale=value, overflows=self.overflows)

    def numbers(self) -> dict[str, float]:
        return {
            "loss_scale": self.value,
            "loss_scale_good": self.good,
            "loss_scale_overflows": self.overflows,
        }

    def restore(self, numbers: Mapping[str, float]) -> None:
        self.value = numbers.get("loss_scale", self.FIRST)
        self.good, self.overflows = (
            int(numbers.get(f"loss_scale_{name}", 0)) for name in ("good", "overflows")
        )


def loss_scale_for(compute: str) -> LossScale:
    """Return the loss scale that the setting precision.compute needs."""
    return DynamicLossScale() if compute == "float16" else LossScale()


class SkippedUpdates:
    """The count of skipped updates, and the loss scale, which adapts to them.

    number  skipped updates so far; AdamW's step count leaves them out
    """

    def __init__(self, compute: str):
        self.number, self.scale = 0, loss_scale_for(compute)

    def conclude(self, outcome: StepResult) -> StepResult:
        """Count a skipped update, and adapt the scale. All ranks must pass the same result."""
        self.number += not outcome.updated
        return self.scale.after(outcome)

    def scalars(self) -> dict[str, float]:
        """Return the numbers that a checkpoint saves; collective."""
        return {"skipped_updates": self.number, **self.scale.numbers()}

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Continue from the numbers of a checkpoint; collective."""
        self.number = int(scalars.get("skipped_updates", 0))
        self.scale.restore(scalars)
