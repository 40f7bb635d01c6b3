"""The end of a step: the control message, the loss scale, the update; also the mean of an update."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.group import Group
from mpitrain.optim import Optimizer
from mpitrain.parallel.replication.protocol import (
    GradientReducer,
    ParameterStore,
    ReplicationContext,
    StateBuffer,
    StepEnd,
    StepInput,
    StepResult,
)
from mpitrain.regions import Piece
from mpitrain.trace.recorder import UPDATE


def weight_of(targets: int) -> float:
    """Return 1 / targets, the weight of each target of an update in the mean loss.

    This is the division of every average: the loss multiplies its gradient by this weight. Later
    reductions only add. Afterwards `mean_of` corrects for targets that do not count, which no rank
    knows alone. `Replicated` averages over ranks, so it passes the number of ranks.
    """
    return 1 / targets


class Mean(NamedTuple):
    """The loss and gradient of an update, as means over the targets that count.

    loss     NaN if no target counts
    norm     of the mean gradient, before clipping; NaN if no target counts
    counted  the targets that count, as a fraction of all; exactly 1 if none is ignored
    scale    factor of the summed gradient in the update: it divides and clips
    """

    loss: float
    norm: float
    counted: float
    scale: float


def mean_of(
    loss: float,
    squares: float,
    ignored: float,
    targets: int,
    loss_scale: float = 1.0,
    clip: float = 0.0,
) -> Mean:
    """Correct the sums of an update, in which each target already has the weight `weight_of(targets)`.

    The correction undoes the loss scale, divides by the fraction of targets that count, and clips.

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


class ControlMessage:
    """A small all-reduce in host memory, which sums up to five numbers over all ranks."""

    def __init__(self, world: Group):
        self._numbers = np.zeros(5)
        self._sum = world.bind(self._numbers)

    def total(self, *numbers: float) -> list[float]:
        self._numbers[:] = 0
        self._numbers[: len(numbers)] = numbers
        self._sum.run()
        return self._numbers[: len(numbers)].tolist()


class LossScale:
    """The constant loss scale 1, for dtypes with the range of float32."""

    value = 1.0

    def after(self, outcome: StepResult) -> StepResult:
        """Adapt the scale to a step's result; fill in its fields `loss_scale` and `overflows`.

        All ranks pass the same result, so all get the same scale.
        """
        return outcome

    def numbers(self) -> dict[str, float]:
        return {}

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Continue from the `numbers` of a checkpoint; without them, from the initial scale."""


class DynamicLossScale(LossScale):
    """The dynamic loss scale of float16: it doubles after GOOD steps without an overflow, and
    halves after an overflow.

    An overflow is a gradient that is not finite although the loss is finite. Its update is skipped,
    and the run continues.

    value      current factor of the loss
    good       steps without an overflow since the last change of `value` or the last overflow
    overflows  consecutive steps with an overflow
    source     Micikevicius et al. 2018, Mixed Precision Training, ICLR, section 3.2
    """

    FIRST, LEAST, MOST, GOOD = 2.0**16, 1.0, 2.0**24, 200

    def __init__(self) -> None:
        self.value, self.good, self.overflows = self.FIRST, 0, 0

    def after(self, outcome: StepResult) -> StepResult:
        value = self.value
        if not math.isfinite(outcome.loss) or outcome.is_spike:
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
    return DynamicLossScale() if compute == "float16" else LossScale()


class RecentLosses:
    """The mean and the standard deviation of recent losses, weighted as the last WINDOW steps.

    The weights of older losses decay exponentially. A spike is a loss more than `most` standard
    deviations above the mean of at least LEAST losses. It does not count as a recent loss.
    """

    WINDOW, LEAST = 50, 10

    def __init__(self, most: float):
        self.most, self.count, self.mean, self.variance = most, 0, 0.0, 0.0

    def accepts(self, loss: float) -> bool:
        """Return whether a loss is finite and no spike, and count it if so.

        All ranks must pass the same loss.
        """
        above = loss - self.mean
        is_spike = above > 0 and above * above > self.most * self.most * self.variance
        if not math.isfinite(loss) or (is_spike and self.count >= self.LEAST):
            return False
        self.count += 1
        weight = 1 / min(self.count, self.WINDOW)
        self.mean += weight * above
        self.variance = (1 - weight) * (self.variance + weight * above * above)
        return True

    def numbers(self) -> dict[str, float]:
        return {f"losses_{name}": getattr(self, name) for name in ("count", "mean", "variance")}

    def restore(self, numbers: Mapping[str, float]) -> None:
        self.count = int(numbers.get("losses_count", 0))
        self.mean = numbers.get("losses_mean", 0.0)
        self.variance = numbers.get("losses_variance", 0.0)


class SkippedUpdates:
    """The count of skipped updates, and what it depends on: the loss scale, and recent losses.

    number   skipped updates so far; AdamW's step count leaves them out
    accepts  (loss) -> whether it is finite and, unless run.on_spike is ignore, no spike
    """

    def __init__(self, compute: str, most: float = 0.0):
        """most: run.spike; 0: there are no spikes"""
        self.number, self.scale = 0, loss_scale_for(compute)
        self._losses = RecentLosses(most) if most else None
        self.accepts = self._losses.accepts if self._losses else math.isfinite

    def conclude(self, outcome: StepResult) -> StepResult:
        """Count a skipped update, and adapt the scale. All ranks must pass the same result."""
        self.number += not outcome.updated
        return self.scale.after(outcome)

    def scalars(self) -> dict[str, float]:
        losses = self._losses.numbers() if self._losses else {}
        return {"skipped_updates": self.number, **self.scale.numbers(), **losses}

    def restore(self, scalars: Mapping[str, float]) -> None:
        self.number = int(scalars.get("skipped_updates", 0))
        self.scale.restore(scalars)
        if self._losses:
            self._losses.restore(scalars)


class AgreeAndUpdate(StepEnd):
    """All ranks agree on loss, norm and stop requests; then each rank updates its own pieces.

    All other step ends inherit from this class and replace public methods. All modes call the
    optimizer in `apply`, where an update rule also reduces its sums over whole tensors.

    optimizer  updates the pieces of `reducer.summed`, which may be none
    """

    def __init__(
        self, replica: ReplicationContext, store: ParameterStore, reducer: GradientReducer
    ):
        config, device = replica.config, replica.device
        self.replica, self.store, self.reducer = replica, store, reducer
        most = config.run.spike if config.run.on_spike != "ignore" else 0.0
        self.skips = SkippedUpdates(config.precision.compute, most)
        self.optimizer = Optimizer(
            config.optimizer,
            replica.storage,
            list(reducer.summed),
            device.ops,
            device.backend,
            replica.arena,
            replica.grid.fact_sums(*store.sharing, replica.grid.tp),
        )
        self.recorder = recorder = replica.grid.transport.recorder
        with recorder.called("the control message"):
            self.control = ControlMessage(replica.grid.world)
        self._gradients_name = recorder.name("the sums of gradients", reducer.members)
        self._norm_name = recorder.name("the norm")
        self.update_name = recorder.name("the parameters")
        self._exchanged_s = 0.0  # `begin` copies grid.exchanged_s to here
        # Padding may contain non-finite numbers: blocks of wire formats include it.
        self._is_spoiled = False

    def begin(self, step: int) -> None:
        self._exchanged_s = self.replica.grid.exchanged_s
        if self._is_spoiled:
            self.reducer.buffer.fill(0)
            self._is_spoiled = False
        self.reducer.begin(step)

    def sum(self, step_input: StepInput) -> tuple[float, float, int]:
        """Wait for the summed gradients. Exposed time includes the exchange of activations.

        returns  this rank's loss, and the sum of squares and the non-finite elements of the
                 gradients in `reducer.squared`
        """
        exposed = self.replica.exposed
        wait = self.recorder.wait(self._gradients_name)
        with exposed:
            self.reducer.wait()
        self.recorder.go_on(wait)
        exposed.seconds += self.replica.grid.exchanged_s - self._exchanged_s
        span = self.recorder.compute(self._norm_name)
        stats = self.replica.gradient_stats(step_input, self.reducer.squared)
        self.recorder.end(span)
        return stats

    def result_of(self, step_input: StepInput, totals: Sequence[float]) -> tuple[StepResult, float]:
        """Return the result of a step, and the factor `scale` of the summed gradient in its update.

        `updated` is true if loss and norm are finite, and the loss is no spike.

        totals  over all ranks: loss, sum of squares, non-finite elements, requests to stop, ignored
                targets
        """
        loss, squares, nonfinite, stop, ignored = totals
        clip, loss_scale = self.replica.config.optimizer.clip, self.skips.scale.value
        mean = mean_of(loss, squares, ignored, step_input.targets, loss_scale, clip)
        accepts = self.skips.accepts(mean.loss)
        is_finite = math.isfinite(mean.loss) and math.isfinite(mean.norm)
        return StepResult(
            mean.loss,
            mean.norm,
            int(nonfinite),
            step_input.lr,
            is_finite and accepts,
            stop > 0,
            counted=mean.counted,
            is_spike=is_finite and not accepts,
        ), mean.scale

    def apply(self, scale: float, lr: float, step: int) -> None:
        """Update this rank's pieces from `scale` times their gradients.

        step  number of this update, from 1; skipped updates do not count
        """
        gradients, delayed = self.reducer.summed, self.reducer.delayed
        owned = self.store.owned
        self.optimizer.sum_facts(
            lambda piece: (owned[piece], gradients[piece]), scale, lr, step, delayed
        )

        def update(piece: Piece, parameters: Any, mirror: Any) -> None:
            self.optimizer.update(
                piece, parameters, gradients[piece], scale, lr, step, delayed, mirror
            )

        self.store.update(update)

    def update(self, step_input: StepInput, agree: Callable[..., Sequence[float]]) -> StepResult:
        """Wait for the gradients, agree on the result, and update if it is finite.

        agree  (loss, squares, non-finite elements, stop requests, ignored targets) -> the sums of
               these numbers over all ranks that make the same update
        """
        exposed, skips = self.replica.exposed, self.skips
        loss, squares, nonfinite = self.sum(step_input)
        with exposed:
            totals = agree(loss, squares, nonfinite, step_input.stop, step_input.ignored)
        outcome, scale = self.result_of(step_input, totals)
        if outcome.updated:
            span = self.recorder.compute(self.update_name, UPDATE)
            self.apply(scale, step_input.lr, step_input.number + 1 - skips.number)
            self.recorder.end(span)
        self._is_spoiled = not outcome.updated
        return skips.conclude(outcome._replace(comm_s=exposed.take()))

    def finish(self, step_input: StepInput) -> StepResult:
        self.store.sync()
        return self.update(step_input, self.control.total)

    def sync(self) -> None:
        self.store.sync()

    def state(self) -> list[StateBuffer]:
        arrays = self.optimizer.arrays() if self.optimizer.pieces else []
        return [StateBuffer.of(array) for array in arrays]
