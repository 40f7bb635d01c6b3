"""The loss scale: what losses are multiplied by, so that small gradients are not rounded to zero in float16."""

import math
from collections.abc import Mapping

from mpitrain.parallel.replication.records import StepResult


class LossScale:
    """Where gradients of any size are held: none is needed."""

    value = 1.0

    def after(self, outcome: StepResult) -> StepResult:
        """A step's outcome as this scale makes it, which adapts to it: alike on all ranks, for they know the same outcome."""
        return outcome

    def numbers(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return {}

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Go on from what a checkpoint kept; as in a new run if that is nothing."""


class DynamicLossScale(LossScale):
    """As large as gradients in float16 bear: it doubles after GOOD steps without an overflow, and halves with one.

    An overflow is a gradient that is not finite under a loss that is: the step is skipped, and not the run's fault.

    value      by which losses are multiplied now
    good       steps without overflow since the value changed
    overflows  steps in a row that overflowed
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
    """What precision.compute asks for."""
    return DynamicLossScale() if compute == "float16" else LossScale()
