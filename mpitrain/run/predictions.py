"""What a run predicts for held-out rows of samples and images, and its errors in the unit of the data."""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpitrain.data import read_rows, targets_of
from mpitrain.regions import share
from mpitrain.run.job import Job


def predicted(job: Job, rows: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the outputs and the targets of some held-out rows, in their order; collective.

    Each is (rows, outputs) float64, on every rank: logits beside the class (rows, 1), probabilities
    of a loss bce, or numbers in the unit of the data.
    """
    trainer, source = job.trainer, job.data
    grid, batch, kind = trainer.grid, trainer.config.batch, targets_of(source)
    width = 1 if kind == "classes" else source.classes
    together = grid.axes.dp * max(1, batch.size // (grid.axes.dp * batch.micro_batches))
    table = np.zeros((together, source.classes + width))
    every = grid.world.bind(table.reshape(-1))
    restored: Any = getattr(source, "restored", lambda y: y)
    for start in range(0, len(rows), together):
        some = rows[start : start + together]
        own = share(len(some), grid.coords.dp, grid.axes.dp)
        # A rank without rows computes one that does not count.
        numbers = [some[row] for row in own] or [some[0]]
        name, read = trainer.config.data.source, partial(source.held_out_rows, numbers)
        inputs, targets = read_rows(name, source, len(numbers), read)
        outputs = trainer.logits(inputs)
        table[:] = 0
        if outputs is not None and own and grid.reports_loss:
            y = np.float64(trainer.backend.to_host(outputs))
            right = np.float64(targets.reshape(len(numbers), -1))
            if kind != "classes":
                y = 1 / (1 + np.exp(-y)) if kind == "fractions" else restored(y)
                right = restored(right)
            table[own.start : own.stop] = np.concatenate([y, right], 1)
        every.run()
        yield (
            table[: len(some), : source.classes].copy(),
            table[: len(some), source.classes :].copy(),
        )


def errors(job: Job, rows: Sequence[int]) -> dict[str, float]:
    """Return the errors of held-out rows by name: accuracy of fractions, else MSE, MAE and R2; collective.

    Targets NaN do not count. R2 is the mean over outputs, as `r2_score` of scikit-learn.
    """
    counts = total = squares = error_squares = sizes = right = np.zeros(job.data.classes)
    centre: Any = None
    for y, target in predicted(job, rows):
        counted = ~np.isnan(target)
        centre = np.where(counted, target, 0).mean(0) if centre is None else centre
        error, shifted = np.where(counted, y - target, 0), np.where(counted, target - centre, 0)
        counts, total = counts + counted.sum(0), total + shifted.sum(0)
        squares, error_squares = squares + (shifted**2).sum(0), error_squares + (error**2).sum(0)
        sizes = sizes + np.abs(error).sum(0)
        right = right + (counted & ((y > 0.5) == (target > 0.5))).sum(0)
    if targets_of(job.data) == "fractions":
        return {"accuracy": float(right.sum() / counts.sum())}
    with np.errstate(divide="ignore", invalid="ignore"):
        explained = 1 - error_squares / (squares - total**2 / counts)
    means = error_squares.sum() / counts.sum(), sizes.sum() / counts.sum(), explained.mean()
    return dict(zip(("mse", "mae", "r2"), map(float, means), strict=True))
