"""The throughput of micro-batches of several sizes, timed in turns by one trainer."""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from mpitrain.run.build import Job
from mpitrain.tools.plan.stages import FAR

SIZES = 9
"""Largest number of sizes that are timed."""

BLOCKS = 5
"""Turns of each size. A turn is a few steps in sequence; the sizes alternate turn by turn."""

TURN_S = 0.05
"""Smallest length of a turn in seconds, unless it already has TURN steps."""

TURN = 8
"""Largest number of steps in a turn. The time of a turn is the median over its steps."""


class Timed(NamedTuple):
    """The steps of micro-batches of one size.

    rows     of a micro-batch
    size     rows of a step over all ranks
    blocks   seconds of a step in each turn, on the slowest rank; empty: one step was run, not timed
    first_s  seconds of the faster of the first two steps, of which the first also allocates
    """

    rows: int
    size: int
    blocks: list[float]
    first_s: float

    @property
    def step_s(self) -> float:
        """The median over the turns, in seconds."""
        return median(self.blocks) if self.blocks else math.nan

    @property
    def rows_per_s(self) -> float:
        """Rows of all ranks per second."""
        return self.size / self.step_s

    @property
    def is_spoilt(self) -> bool:
        """Whether other work ran in most turns, so that these times prove nothing."""
        return not self.step_s <= FAR * min(self.blocks, default=0.0)


def sizes(unit: int, most: int) -> list[int]:
    """Return the sizes to time: powers of two times `unit`, and the largest, at most SIZES."""
    rows = [unit << i for i in range((most // unit).bit_length())]
    rows += [most] if rows[-1] < most else []
    # The smallest sizes are too slow to be the best.
    return rows if len(rows) <= SIZES else [unit, *rows[1 - SIZES :]]


class Steps:
    """Training steps of one job with fewer rows than its batch has.

    The job has the learning rate `STILL`, so its parameters stay as they are.
    """

    STILL = 1e-12

    def __init__(self, job: Job, rows: int):
        """rows: number of rows in a micro-batch of the job's own batch."""
        self._job, self.rows = job, rows
        self.size = job.trainer.config.batch.size
        self._read: tuple[int, tuple[np.ndarray, np.ndarray]] | None = None

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of this rank in global batch `number`; the last one is saved."""
        if self._read is None or self._read[0] != number:
            replication = self._job.trainer.replication
            self._read = number, replication.rows.batch(self._job.data, number)
        return self._read[1]

    def run(self, number: int, rows: int, first: int = 0) -> tuple[float, float, float]:
        """Run a step with `rows` rows in each micro-batch; collective.

        first    index of the first micro-batch of this size to take from the batch
        returns  seconds on this rank, gradient norm, and fraction of the counted targets
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
    """Time steps of each size in turns; collective.

    Sizes whose turns would take longer than `seconds` in all are left out. Of the largest size one
    step is run then, if it takes at most `seconds`.

    every    rows of a micro-batch, ascending
    gather   (number) -> the numbers of all ranks
    show     called before each step with its size
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

    None if a size might be faster but for other work that ran in most of its turns.
    """
    every = [each for each in timed if each.blocks]
    quiet = [each for each in every if not each.is_spoilt]
    best = max(quiet, key=lambda each: each.rows_per_s, default=None)
    doubtful = [each.size / min(each.blocks) for each in every if each.is_spoilt]
    return best if best and best.rows_per_s >= max(doubtful, default=0.0) else None
