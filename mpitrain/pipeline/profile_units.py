"""A partition by measured time: what every unit takes on every rank, and what stages of unequal speed are given."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from mpitrain.layers.base import Unit
from mpitrain.layers.flat import Storage
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import Backend
from mpitrain.pipeline.partition import balanced

REPEATS = 3
"""Times that each unit computes; the fastest counts."""


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
    """Seconds that each unit takes there and back on this rank, the loss counted with the last. Holds one unit at a time.

    units  of layers that this rank shares with no other
    x      input of the first, in the backend's memory
    loss   (output of the last) -> the gradient of that output
    stored, computed  dtypes of gradients of parameters, and of what layers compute with
    """
    draw, found = np.random.default_rng(0), []

    def drawn(shape: tuple[int, ...], size: float) -> Any:
        return backend.from_host((size * draw.standard_normal(shape, np.float32)).astype(computed))

    for index, unit in enumerate(units):
        storage = Storage([replace(unit, tied={}, held={})], stored)
        (weights,) = storage.weights(drawn((storage.length,), 0.02))
        (gradients,), (leaves,) = storage.gradients(backend.zeros(storage.length, stored))
        end = loss if index == len(units) - 1 else None
        given: Any = None if end else drawn(unit.layer.output_shape(x.shape), 1e-3)
        times = []
        for _ in range(REPEATS):
            for leaf in leaves:
                leaf.filled = False
            backend.synchronize()
            start = clock()
            y, saved = unit.layer.forward(weights, x, arena)
            dy = end(y) if end else given
            _, pending = unit.layer.backward_input(weights, dy, saved, arena)
            unit.layer.backward_weight(pending, gradients, arena)
            backend.synchronize()
            times.append(clock() - start)
            del saved, pending, dy
        found.append(min(times))
        x = y
    return found


def by_time(
    seconds: Sequence[Sequence[float]], stages: Sequence[int], place: Sequence[int]
) -> list[int]:
    """How many units each part has, so that the slowest stage is as fast as can be.

    A unit costs the mean of its shares of what a rank takes for all units; a stage is as fast as its slowest rank.
    seconds  of each unit, by rank
    stages   the stage that each rank holds
    place    the stage of each part
    raises   ConfigError if there are fewer units than parts
    """
    totals = [sum(mine) for mine in seconds]
    costs = [
        fmean(one / total for one, total in zip(each, totals, strict=True))
        for each in zip(*seconds, strict=True)
    ]
    slowest = {
        stage: max(total for total, its in zip(totals, stages, strict=True) if its == stage)
        for stage in {*stages}
    }
    return balanced(costs, len(place), [1 / slowest[stage] for stage in place])
