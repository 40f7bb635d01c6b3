"""The loss scale: a factor against underflow of float16 gradients (as torch.amp.GradScaler).

`SkippedUpdates` counts the updates that overflows and other non-finite gradients prevent.
"""

import math
from collections.abc import Mapping

from mpitrain.parallel.replication.records import StepResult


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
