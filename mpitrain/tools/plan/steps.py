"""Measured training steps: the throughput of micro-batches of several sizes, and the gradient noise scale.

The gradient noise scale B_simple = tr(S) / |G|^2, in rows, estimates the critical batch size. G is
the mean gradient, S the covariance of the gradient of one row (McCandlish et al. 2018, An Empirical
Model of Large-Batch Training, arXiv:1812.06162).

The mean gradient G_b of b rows has E |G_b|^2 = |G|^2 + tr(S) / b. So the norms for two batch sizes
give unbiased estimates of |G|^2 and tr(S) (appendix A.1). Here the large batch is the union of the
small ones: both have the same rows, and no gradient is stored.
"""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from mpitrain.run.job import Job
from mpitrain.tools.plan.stages import FAR

SIZES = 9
"""Largest number of sizes that are timed."""

BLOCKS = 5
"""Turns of each size. A turn is a few steps in sequence; the sizes alternate turn by turn."""

TURN_S = 0.05
"""Smallest length of a turn in seconds, unless it already has TURN steps."""

TURN = 8
"""Largest number of steps in a turn. The time of a turn is the median over its steps."""

LEAST, MOST = 16, 400
"""Numbers of large batches: at least, if the time suffices, and at most. The standard error of
fewer batches is itself uncertain.
"""

PRECISE = 0.05
"""Relative standard error at which no further batch is read."""

UNCERTAIN = 0.2
"""Relative standard error from which an estimate is marked."""


class Timed(NamedTuple):
    """Steps with micro-batches of one size.

    rows     of a micro-batch
    size     rows of a step over all ranks
    blocks   by turn: seconds of a step, on the slowest rank; empty if a step ran but was not timed
    first_s  seconds of the faster of the first two steps, of which the first also allocates
    """

    rows: int
    size: int
    blocks: list[float]
    first_s: float

    @property
    def step_s(self) -> float:
        return median(self.blocks) if self.blocks else math.nan

    @property
    def rows_per_s(self) -> float:
        return self.size / self.step_s

    @property
    def is_spoilt(self) -> bool:
        """Whether other work ran in most turns, so that these times are invalid."""
        return not self.step_s <= FAR * min(self.blocks, default=0.0)


def sizes(unit: int, most: int) -> list[int]:
    """Return at most SIZES sizes to time: `most`, and powers of two times `unit` below it."""
    rows = [unit << i for i in range((most // unit).bit_length())]
    rows += [most] if rows[-1] < most else []
    # The smallest sizes are too slow to be the best.
    return rows if len(rows) <= SIZES else [unit, *rows[1 - SIZES :]]


class Steps:
    """Training steps of one job, with at most as many rows as the job's batch has.

    The job's learning rate is `STILL`, which is so small that its parameters stay as they are.
    """

    STILL = 1e-12

    def __init__(self, job: Job, rows: int):
        """rows  number of rows in a micro-batch of the job's own batch"""
        self._job, self.rows = job, rows
        self.size = job.trainer.config.batch.size
        self._read: tuple[int, tuple[np.ndarray, np.ndarray]] | None = None

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's rows of global batch `number`. The batch that was read last is stored."""
        if self._read is None or self._read[0] != number:
            replica = self._job.trainer.replica
            self._read = number, replica.batch(self._job.data, number)
        return self._read[1]

    def run(self, number: int, rows: int, first: int = 0) -> tuple[float, float, float]:
        """Take a step with `rows` rows in each micro-batch. Collective.

        first    of the parts of the batch that have this size: the number of the part to use
        returns  seconds on this rank, norm of the gradient, and fraction of the targets that count
        """
        inputs, targets = self.batch(number)
        whole = len(inputs) * rows // self.rows
        part = slice(first * whole, (first + 1) * whole)
        trainer = self._job.trainer
        trainer.transport.barrier()
        start = time.perf_counter()
        result = trainer.step(number, inputs[part], targets[part])
        trainer.backend.synchronize()
        return time.perf_counter() - start, result.grad_norm, result.counted


def time_sizes(
    steps: Steps,
    every: Sequence[int],
    seconds: float,
    gather: Callable[[float], list[float]],
    show: Callable[[int], None] = lambda rows: None,
) -> list[Timed]:
    """Time steps of each size in turns. Collective.

    Sizes are timed in ascending order as long as all their turns together take at most `seconds`.
    If the largest size is not among them, one step of it is run, unless that takes more than
    `seconds`.

    every    rows of a micro-batch, ascending
    gather   (number) -> the numbers of all ranks
    show     called with the size before each step
    """

    def slowest(rows: int) -> float:
        show(rows)
        return max(gather(steps.run(0, rows)[0]))

    timed: list[Timed] = []
    for rows in every:
        last = timed[-1] if timed else None
        if last and _expected_s(last, rows) * (BLOCKS + 2) > seconds - _spent_s(timed):
            break
        first_s = min(slowest(rows), slowest(rows))
        timed.append(Timed(rows, steps.size * rows // steps.rows, [], first_s))
    last, most = timed[-1], every[-1]
    proof = []
    if last.rows < most and _expected_s(last, most) <= seconds:
        proof = [Timed(most, steps.size * most // steps.rows, [], slowest(most))]
    for _ in range(BLOCKS):
        for each in timed:
            each.blocks.append(median(slowest(each.rows) for _ in range(_turn_steps(each))))
    return [*timed, *proof]


def _turn_steps(size: Timed) -> int:
    return max(1, min(TURN, int(TURN_S / size.first_s)))


def _expected_s(last: Timed, rows: int) -> float:
    return last.first_s * rows / last.rows


def _spent_s(timed: Sequence[Timed]) -> float:
    return sum((2 + BLOCKS * _turn_steps(each)) * each.first_s for each in timed)


def fastest(timed: Sequence[Timed]) -> Timed | None:
    """Return the size with the most rows per second.

    None if another size might be faster, but other work ran in most of its turns.
    """
    every = [each for each in timed if each.blocks]
    quiet = [each for each in every if not each.is_spoilt]
    best = max(quiet, key=lambda each: each.rows_per_s, default=None)
    doubtful = [each.size / min(each.blocks) for each in every if each.is_spoilt]
    return best if best and best.rows_per_s >= max(doubtful, default=0.0) else None


class Norms(NamedTuple):
    """Squared gradient norms: of one large batch, and the mean over the small ones that it consists
    of.
    """

    large: float
    small: float


class Noise(NamedTuple):
    """An estimate of the gradient noise scale.

    rows     B_simple in rows; infinity if the estimate of |G|^2 is not above 0
    error    standard error of `rows`, by the jackknife over batches
    batches  number of large batches
    large    rows of a large batch
    small    rows of a small batch
    """

    rows: float
    error: float
    batches: int
    large: int
    small: int

    @property
    def is_uncertain(self) -> bool:
        """Whether the estimate is not finite, or its standard error is large or uncertain."""
        is_known = math.isfinite(self.rows) and 2 * self.batches >= LEAST
        return not (is_known and self.error <= UNCERTAIN * self.rows)

    def samples_factor(self, size: int) -> float:
        """Return how many rows training needs with this batch size, relative to the least number."""
        return 1 + size / self.rows

    def steps_factor(self, size: int) -> float:
        """Return how many steps training needs with this batch size, relative to the least number."""
        return 1 + self.rows / size


def estimate(norms: Sequence[Norms], large: int, small: int) -> Noise:
    """Return the noise scale from squared norms of several large batches.

    Estimates of tr(S) and |G|^2 are averaged before one is divided by the other: a mean of ratios
    would be biased.

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
    square = (large * mean[0] - small * mean[1]) / (large - small)
    trace = (mean[1] - mean[0]) / (1 / small - 1 / large)
    return float(trace / square) if square > 0 else math.inf


def measure_noise(
    steps: Steps,
    rows: int,
    unit: int,
    is_over: Callable[[], bool],
    show: Callable[[int], None] = lambda batches: None,
) -> Noise | None:
    """Measure the gradient noise scale at the present parameters. Collective.

    rows     of a micro-batch of a large batch
    unit     rows of a micro-batch of a small batch, which has one micro-batch of each replica
    is_over  () -> whether to end; called after each large batch, equal on all ranks
    show     called with the number of large batches so far
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

    A step divides its sum by all targets of the job's batch, though only this fraction of its rows
    is there. The division is undone.
    """
    _, norm, counted = steps.run(number, rows, first)
    # `counted` leaves out ignored targets, but not the rows that are missing.
    present = counted - (1 - fraction)
    return norm * counted / present if present > 0 else math.nan
