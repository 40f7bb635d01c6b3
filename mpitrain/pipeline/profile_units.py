"""Partition by measured time: profiles each unit on each rank; fast stages get more units."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from mpitrain.layers.base import Unit, forward_only
from mpitrain.layers.flat import Storage
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import Backend
from mpitrain.pipeline.partition import balanced

REPEATS = 3
"""Measured passes of each unit; the fastest counts."""


def unit_seconds(
    units: Sequence[Unit],
    x: Any,
    loss: Callable[[Any], Any],
    backend: Backend,
    arena: Arena,
    stored: Any,
    computed: Any,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Measure the seconds of each unit's forward and backward on this rank.

    The last unit's time includes the loss. First units without a trained tensor run no backward.
    Only one unit's parameters are in memory at a time.

    units  with complete layers, not sharded over ranks
    x      input of the first unit, in the backend's memory
    loss   (output of the last unit) -> the gradient of that output
    stored, computed  dtypes of the parameters' gradients, and of the layers' arithmetic
    """
    draw, seconds, frozen = np.random.default_rng(0), [], forward_only(units)

    def drawn(shape: tuple[int, ...], size: float) -> Any:
        return backend.from_host((size * draw.standard_normal(shape, np.float32)).astype(computed))

    for index, unit in enumerate(units):
        storage = Storage([replace(unit, tied={}, held={})], stored)
        (weights,) = storage.weights(
            *(drawn((length,), 0.02) for length in (storage.length, storage.frozen.length))
        )
        (gradients,), (leaves,) = storage.gradients(backend.zeros(storage.length, stored))
        end = loss if index == len(units) - 1 else None
        drawn_dy: Any = None if end else drawn(unit.layer.output_shape(x.shape), 1e-3)
        times = []
        for _ in range(REPEATS):
            for leaf in leaves:
                leaf.filled = False
            backend.synchronize()
            start = clock()
            y, saved = unit.layer.forward(weights, x, arena)
            dy = end(y) if end else drawn_dy
            if index >= frozen:
                _, pending = unit.layer.backward_input(weights, dy, saved, arena)
                unit.layer.backward_weight(pending, gradients, arena)
                del pending
            backend.synchronize()
            times.append(clock() - start)
            del saved, dy
        seconds.append(min(times))
        x = y
    return seconds


def by_time(
    seconds: Sequence[Sequence[float]], stages: Sequence[int], stage_of: Sequence[int]
) -> list[int]:
    """Return the number of units in each chunk, so that the slowest stage is as fast as possible.

    The cost of a unit is its share of a rank's total time, averaged over the ranks. A stage is as
    fast as its slowest rank.

    seconds   of each unit, by rank
    stages    the stage of each rank
    stage_of  the stage of each chunk
    raises    ConfigError if there are fewer units than chunks
    """
    totals = [sum(of_rank) for of_rank in seconds]
    costs = [
        fmean(spent / total for spent, total in zip(of_unit, totals, strict=True))
        for of_unit in zip(*seconds, strict=True)
    ]
    slowest = {
        stage: max(total for total, its in zip(totals, stages, strict=True) if its == stage)
        for stage in {*stages}
    }
    return balanced(costs, len(stage_of), [1 / slowest[stage] for stage in stage_of])
