"""The gradient noise scale, which estimates the critical batch size.

G is the mean gradient, S the covariance of the gradient of one row: B_simple = tr(S) / |G|^2 rows.
The source is McCandlish et al. 2018, An Empirical Model of Large-Batch Training, arXiv:1812.06162.

A gradient of b rows has E |G_b|^2 = |G|^2 + tr(S) / b. Norms of two batch sizes therefore give
unbiased estimates of both numbers (appendix A.1). Here the large batch is the union of the small
ones. Both have the same rows, and no gradient is stored.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.tools.plan.batch.timing import Steps

LEAST, MOST = 16, 400
"""Numbers of large batches: at least, if the time suffices, and at most. The standard error of
fewer batches is itself uncertain.
"""

PRECISE = 0.05
"""Relative standard error at which no further batch is read."""

UNCERTAIN = 0.2
"""Relative standard error from which an estimate is marked."""


class Norms(NamedTuple):
    """Squared gradient norms of one large batch and of its small ones, as a mean over these."""

    large: float
    small: float


class Noise(NamedTuple):
    """An estimate of the gradient noise scale.

    rows     B_simple in rows; infinity if |G|^2 is not above 0 by the estimate
    error    its standard error, by the jackknife over batches
    batches  number of large batches
    large    rows of a large batch
    small    rows of a small one
    """

    rows: float
    error: float
    batches: int
    large: int
    small: int

    @property
    def is_uncertain(self) -> bool:
        """Whether the standard error is large or uncertain, or the estimate is not finite."""
        is_known = math.isfinite(self.rows) and 2 * self.batches >= LEAST
        return not (is_known and self.error <= UNCERTAIN * self.rows)

    def samples_factor(self, size: int) -> float:
        """Return the rows that training needs with this batch size, relative to the fewest."""
        return 1 + size / self.rows

    def steps_factor(self, size: int) -> float:
        """Return the steps that training needs with this batch size, relative to the fewest."""
        return 1 + self.rows / size


def estimate(norms: Sequence[Norms], large: int, small: int) -> Noise:
    """Return the noise scale from pairs of squared norms. Numerator and denominator are averaged
    before the division, which would bias the ratio of each pair.

    large, small  rows of the batches
    """
    pairs = np.array(norms)
    total, count = pairs.sum(0), len(pairs)
    # Each jackknife estimate leaves out one pair.
    ratios = [_ratio(mean, large, small) for mean in (total - pairs) / max(1, count - 1)]
    ratio = _ratio(total / count, large, small)
    spread = np.sqrt((count - 1) * np.var(ratios)) if np.isfinite(ratios).all() else math.inf
    return Noise(ratio, float(spread) if count > 1 else math.inf, count, large, small)


def _ratio(mean: np.ndarray, large: int, small: int) -> float:
    """Return tr(S) / |G|^2 from mean squared norms."""
    square = (large * mean[0] - small * mean[1]) / (large - small)
    trace = (mean[1] - mean[0]) / (1 / small - 1 / large)
    return float(trace / square) if square > 0 else math.inf


def measure(
    steps: Steps,
    rows: int,
    unit: int,
    is_over: Callable[[], bool],
    show: Callable[[int], None] = lambda batches: None,
) -> Noise | None:
    """Measure the noise scale at the present parameters; collective.

    rows     of a micro-batch of a large batch
    unit     of a micro-batch of a small one; the micro-batches of all replicas are one small batch
    is_over  whether the time for it has passed; called after each batch, equal on all ranks
    show     called with the number of batches so far
    returns  None if no gradient was finite
    """
    parts, pairs = rows // unit, list[Norms]()
    large, small = (steps.size * each // steps.rows for each in (parts * unit, unit))
    for number in range(MOST):
        norms = [_norm(steps, number, unit, first, small / steps.size) for first in range(parts)]
        whole = _norm(steps, number, parts * unit, 0, large / steps.size)
        if all(map(math.isfinite, (whole, *norms))):
            pairs.append(Norms(whole**2, sum(norm**2 for norm in norms) / parts))
        show(number + 1)
        is_enough = len(pairs) >= LEAST and _is_precise(estimate(pairs, large, small))
        if is_enough or (is_over() and number):
            break
    return estimate(pairs, large, small) if len(pairs) > 1 else None


def _is_precise(noise: Noise) -> bool:
    return math.isfinite(noise.rows) and noise.error <= PRECISE * noise.rows


def _norm(steps: Steps, number: int, rows: int, first: int, fraction: float) -> float:
    """Return the norm of the mean gradient over some rows of a batch.

    A step divides by the targets of its whole batch. Here only a fraction of the rows is there.
    """
    _, norm, counted = steps.run(number, rows, first)
    # `counted` leaves out ignored targets, but not the rows that are missing.
    present = counted - (1 - fraction)
    return norm * counted / present if present > 0 else math.nan
