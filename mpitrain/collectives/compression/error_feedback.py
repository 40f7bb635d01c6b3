"""Error feedback: each rank adds the unsent rest of one sum to the next, so that none is lost."""

import math

import numpy as np

RECENT = 0.1
"""Weight of the newest sum in the moving average that predicts the next; as momentum with 0.9."""

CACHED = 1 << 16
"""Elements processed together in several passes, so that all passes but the first hit the cache."""


class Feedback:
    """Residual and prediction of a format that sends only some of the elements.

    A rank sends the difference between its array and a prediction, a moving average of past sums.
    It adds the residual that it did not send before. The residual decays at the same rate as old
    sums in the prediction. In every run, over all ranks,

        sum + new residuals = inputs + (1 - RECENT) x old residuals.

    Without a prediction, an element sent in one step of ten arrives as ten gradients at once. In
    between, it arrives as none. The cost: one huge but finite gradient has an effect, ever weaker,
    until it has decayed in the average.

    residual    elements not sent yet, (count,); differs between ranks
    prediction  moving average, in which the newest sum weighs RECENT, (count,); same on all ranks
    source      Adikari & Draper 2021, IEEE JSAIT 2(3); arXiv:2108.07827
    """

    def __init__(self, array: np.ndarray, ranks: int):
        self.residual, self.prediction = np.zeros_like(array), np.zeros_like(array)
        self.state = {"residual": self.residual, "prediction": self.prediction}
        self.scratch = np.empty_like(array, shape=min(CACHED, array.size))
        self._share = np.float32(1 / ranks)

    def take(self, array: np.ndarray) -> None:
        """Set `residual` to the array plus the decayed residual minus this rank's prediction.

        The rank has to send this difference. The format then subtracts the part that it sends.
        """
        for start in range(0, array.size, CACHED):
            part = slice(start, start + CACHED)
            kept, prediction = self.residual[part], self.prediction[part]
            kept *= 1 - RECENT
            kept += array[part]
            kept -= np.multiply(prediction, self._share, out=self.scratch[: kept.size])

    def learn(self, total: np.ndarray) -> None:
        """Update the prediction with a sum that was sent whole, unless it is not finite.

        The residual decays in any case.
        """
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
