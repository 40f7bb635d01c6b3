"""Error feedback: what a rank remembers of a sum that travelled in part, so that the rest is late instead of lost."""

import math

import numpy as np

RECENT = 0.1
"""Weight of the newest sum in the average that predicts the next: that of momentum with 0.9."""

CACHED = 1 << 16
"""Elements worked on together in several passes, so that all but the first find them in a cache."""


class Feedback:
    """What a format that sends a part of an array remembers, so that the rest is late instead of lost.

    A rank takes what differs from a prediction, and adds what it could not send before, which fades at the rate at which
    the prediction, an average of past sums, forgets. In every run, over all ranks,

        sum + residuals = what was put in + (1 - RECENT) x the residuals before.

    Without a prediction an element that is sent in one step of ten arrives as ten gradients at once and as none in between.
    The price: one huge but finite gradient is felt, ever weaker, until it has faded from the average.

    residual    what was not sent yet, (count,); of each rank
    prediction  the average, in which the newest sum weighs RECENT, (count,); the same on all ranks
    source      Adikari & Draper 2021, IEEE JSAIT 2(3); arXiv:2108.07827
    """

    def __init__(self, array: np.ndarray, ranks: int):
        self.residual, self.prediction = np.zeros_like(array), np.zeros_like(array)
        self.state = {"residual": self.residual, "prediction": self.prediction}
        self.scratch = np.empty_like(array, shape=min(CACHED, array.size))
        self._share = np.float32(1 / ranks)

    def take(self, array: np.ndarray) -> None:
        """Make the residual what this rank has to send."""
        for start in range(0, array.size, CACHED):
            part = slice(start, start + CACHED)
            kept, prediction = self.residual[part], self.prediction[part]
            kept *= 1 - RECENT
            kept += array[part]
            kept -= np.multiply(prediction, self._share, out=self.scratch[: kept.size])

    def learn(self, total: np.ndarray) -> None:
        """Put a sum that travelled whole into the prediction, unless it is not finite; what was not sent before fades."""
        is_finite = math.isfinite(np.dot(total, total))
        for start in range(0, total.size, CACHED):
            part = slice(start, start + CACHED)
            self.residual[part] *= 1 - RECENT
            if is_finite:
                prediction = self.prediction[part]
                prediction *= 1 - RECENT
                prediction += np.multiply(
                    total[part], np.float32(RECENT), out=self.scratch[: prediction.size]
                )
