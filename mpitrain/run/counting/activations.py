"""The check of activation memory: its bytes are counted before a model exists or a step runs."""

import math
from collections import Counter as Numbers
from collections.abc import Callable
from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.data import Source, Unopened
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.parallel.memory import Room
from mpitrain.pipeline.chunks import Units
from mpitrain.run.counting.step import Counter, Scheduled, StepCounts

MOST = 512
"""The largest number of micro-batches that the check proposes."""


class Fitting(NamedTuple):
    """A number of micro-batches with which a job fits.

    micro_batches  per step and replica
    needed         bytes of activations then
    """

    micro_batches: int
    needed: int


def check_activations(
    job: Scheduled,
    source: Source | Unopened,
    units: Units,
    room: Room,
    rank: int,
    replanned: Callable[[int], Scheduled | None],
) -> StepCounts:
    """Return this rank's counted step; raise ConfigError if the activations do not fit.

    A step that cannot be counted fits: the result names the problem.

    The error has the numbers and the fewest micro-batches that fit, which it finds by counting.

    room       memory that parameters, gradients and optimizer state leave
    replanned  (micro-batches) -> the job with so many, or None if they do not fit its keys
    """

    def needed(scheduled: Scheduled) -> tuple[int, StepCounts]:
        return bytes_needed(scheduled, source, units, room, rank)

    try:
        activations, counts = needed(job)
    except MpitrainError:
        raise
    except Exception as error:  # A plugin's layer may use an array in a way that needs memory.
        return StepCounts(problem=f"{type(error).__name__}: {error}")
    if room.needed + activations <= room.free:
        return counts
    axes, micro_batches = job.axes, job.plan.micro_batches
    rows = -(-job.config.batch.size // axes.dp)
    fitting = _fitting(
        replanned,
        micro_batches,
        rows,
        room.free - room.needed,
        lambda proposed: needed(proposed)[0],
    )
    raise ConfigError(
        f"{len(room.ranks)} rank(s) need {room.needed / 1e9:,.2f} GB for parameters, gradients and optimizer state "
        f"and {activations / 1e9:,.2f} GB for activations {room.where}, with {micro_batches} micro-batch(es) of "
        f"{-(-rows // micro_batches)} row(s), but {room.free / 1e9:,.2f} GB {room.allowed}.",
        f"Set batch.micro_batches to {fitting.micro_batches}: activations then need {fitting.needed / 1e9:,.2f} GB."
        if fitting
        else f"{_savings(job.config)} model.width or model.context: no larger number of micro-batches "
        "fits.",
    )


def _savings(config: Config) -> str:
    """Return the settings that save activations and are not set, as the start of an advice."""
    ways = []
    if config.memory.attention == "whole":
        ways.append("memory.attention to tiled")
    if not config.memory.segment:
        ways.append("memory.recompute to unit")
    return f"Set {' or '.join(ways)}, or lower" if ways else "Lower"


def bytes_needed(
    job: Scheduled,
    source: Source | Unopened,
    units: Units,
    room: Room,
    rank: int,
) -> tuple[int, StepCounts]:
    """Return the bytes of activations in the memory of this rank, and its own counts.

    The memory is that of its host or GPU. All other ranks that share it are counted, too.
    """
    axes = job.axes
    workers = axes.ranks - axes.servers
    tp, dp, pp = axes.coords(rank) if rank < workers else (0, 0, 0)
    counter = Counter(job, source, units, tp)
    counts = counter.step(pp, dp)
    # The ranks of a stage need almost equal bytes, so each stage is counted once.
    stages = Numbers(axes.coords(r).pp for r in room.ranks if r < workers)
    peaks = {stage: counts.peak if stage == pp else counter.step(stage).peak for stage in stages}
    total = sum(number * peaks[stage] for stage, number in stages.items())
    return total, counts if rank < workers else StepCounts()


def _fitting(
    replanned: Callable[[int], Scheduled | None],
    micro_batches: int,
    rows: int,
    free: float,
    needed: Callable[[Scheduled], int],
) -> Fitting | None:
    """Return the fewest micro-batches whose activations fit, by bisection; None if none fit.

    micro_batches  a number that does not fit
    rows           of a replica's step
    needed         (job) -> bytes of activations
    """
    best = None
    low, high = micro_batches + 1, min(rows, MOST)
    while low <= high:
        middle = (low + high) // 2
        proposed = next(filter(None, map(replanned, range(middle, high + 1))), None)
        nbytes = needed(proposed) if proposed else math.inf
        if proposed and nbytes <= free:
            best = Fitting(proposed.plan.micro_batches, int(nbytes))
            high = middle - 1
        elif proposed:
            low = proposed.plan.micro_batches + 1
        else:
            high = middle - 1
    return best
