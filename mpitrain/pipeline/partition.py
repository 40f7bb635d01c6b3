"""Partition of a model into chunks: balanced by parameters or by measured time, or counted by hand."""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.layers.base import Now, Unit, forward_only, parameters_of
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import Arena, Backend

TIME = "time"
"""The value of `pipeline.partition` for measured times; run/build.py replaces it by counts."""
REPEATS, MOST, AGREE = 3, 6, 1.1
"""Measured passes of each unit, at most so many while the two fastest differ by more than this ratio."""


class UnitTime(NamedTuple):
    """A unit's seconds, forward and backward, of its fastest pass.

    is_doubtful  whether no other pass took about as long
    """

    seconds: float
    is_doubtful: bool


def balanced(
    costs: Sequence[float], chunks: int, speeds: Sequence[float] | None = None
) -> list[int]:
    """Return the number of units in each chunk, so that the slowest chunk is as fast as possible.

    Among these partitions the most even one is returned.

    costs    of each unit: parameters, or measured seconds
    speeds   of the stage of each chunk, cost per time; None: all equal
    returns  counts, at least 1 each; a chunk is a run of consecutive units
    raises   ConfigError if there are fewer units than chunks
    """
    check_enough(len(costs), chunks)
    speeds = speeds or [1.0] * chunks
    sums = [0.0, *accumulate(costs)]

    def seconds(chunk: int, start: int, stop: int) -> float:
        return (sums[stop] - sums[start]) / speeds[chunk]

    slowest = max(_times(_cut(len(costs), chunks, seconds, max), seconds))

    def unevenness(chunk: int, start: int, stop: int) -> float:
        return (
            seconds(chunk, start, stop) ** 2
            if seconds(chunk, start, stop) <= slowest
            else float("inf")
        )

    bounds = _cut(len(costs), chunks, unevenness, lambda before, last: before + last)
    return [stop - start for start, stop in pairwise(bounds)]


def assign_units(
    units: Sequence[Unit], counts: Sequence[int], stage_of: Sequence[int]
) -> tuple[list[list[Unit]], dict[str, list[int]]]:
    """Return the units of each chunk, and {full name: stages} of tied tensors on several stages.

    Each of these stages stores the tensor in its first unit that uses it. Shape and initial values
    are those of the layer that gives the tensor its name. The gradient is the sum over the stages.
    The first stage owns the tensor; the others have copies.

    counts    number of units in each chunk
    stage_of  the stage of each chunk
    """
    bounds = [0, *accumulate(counts)]
    stage_of = [stage for stage, count in zip(stage_of, counts, strict=True) for _ in range(count)]
    described = {f"{unit.name}.{p.name}": p for unit in units for p in parameters_of(unit)}
    # Maps each tied tensor to its uses, in order: (index of the unit, the tensor's name in it).
    users: dict[str, list[tuple[int, str]]] = {}
    for full in sorted({full for unit in units for full in unit.tied.values()}):
        users[full] = [
            (index, p.name)
            for index, unit in enumerate(units)
            for p in unit.layer.parameters()
            if unit.full_name(p) == full
        ]
    tied = {full: sorted({stage_of[index] for index, _ in uses}) for full, uses in users.items()}
    tied = {full: stages for full, stages in tied.items() if len(stages) > 1}
    marked = list(units)
    for full, stages in tied.items():
        for stage in stages:
            index, name = next(use for use in users[full] if stage_of[use[0]] == stage)
            tensor = described[full]._replace(
                name=full, holders=full, partial=True, is_copy=stage != stages[0]
            )
            marked[index] = replace(marked[index], held={**marked[index].held, name: tensor})
    return [marked[start:stop] for start, stop in pairwise(bounds)], tied


def _times(bounds: Sequence[int], seconds: Callable[[int, int, int], float]) -> list[float]:
    """Return the time of each chunk.

    bounds   the first unit of each chunk, then the number of units
    seconds  (chunk, start, stop) -> time of these units as that chunk
    """
    return [seconds(chunk, start, stop) for chunk, (start, stop) in enumerate(pairwise(bounds))]


def _cut(
    units: int,
    chunks: int,
    cost: Callable[[int, int, int], float],
    joined: Callable[[float, float], float],
) -> list[int]:
    """Return the bounds of the chunks, from 0 to `units`, with the least joint cost.

    The result is exact, by dynamic programming.

    cost    (chunk, start, stop) -> the cost of these units as that chunk
    joined  (cost of the chunks before, cost of a chunk) -> cost of both; rises with the first
    """
    # best[n] maps the number of units in the first n chunks to (cost, last cut).
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for chunk in range(chunks):
        best.append(
            {
                stop: min(
                    (joined(best[chunk][start][0], cost(chunk, start, stop)), start)
                    for start in range(chunk, stop)
                    if start in best[chunk]
                )
                for stop in range(chunk + 1, units - (chunks - 1 - chunk) + 1)
            }
        )
    bounds = [units]
    for chunk in reversed(range(chunks)):
        bounds.append(best[chunk + 1][bounds[-1]][1])
    return bounds[::-1]


def explicit(text: str, units: int, chunks: int) -> list[int]:
    """Return the number of units in each chunk from a text such as "4,4,3,5".

    raises   ConfigError unless there are `chunks` numbers of at least 1 that sum to `units`
    """
    check_enough(units, chunks)
    words = text.split(",")
    counts = [int(word) for word in words if re.fullmatch(r" *[0-9]{1,9} *", word)]
    if (
        len(counts) != len(words)
        or len(counts) != chunks
        or min(counts) < 1
        or sum(counts) != units
    ):
        even = ",".join(map(str, balanced([1.0] * units, chunks)))
        raise ConfigError(
            f"A partition by hand is {chunks} numbers of at least 1 that add up to {units} units, but {text!r} is "
            f"{len(words)} that add up to {sum(counts)}.",
            f"Write {even}, for example.",
        )
    return counts


def cut(units: Sequence[Unit], chunks: int, partition: str) -> list[int]:
    """Return the number of units in each chunk, from `partition` or balanced by parameters.

    raises   ConfigError as `explicit`, and for TIME: units cannot be timed here without data
    """
    if partition == TIME:
        raise ConfigError(
            "A Trainer of your own units is not cut by time, but pipeline.partition is time.",
            "Time them with pipeline.timed, and write the numbers into pipeline.partition; or leave it empty.",
        )
    if partition:
        return explicit(partition, len(units), chunks)
    return balanced(
        [sum(math.prod(p.shape) for p in unit.layer.parameters()) for unit in units], chunks
    )


def check_enough(units: int, chunks: int) -> None:
    if units < chunks:
        raise ConfigError(
            f"Every chunk of a pipeline needs a unit of the model, but there are {units} units for {chunks} chunks "
            "(stages x chunks).",
            f"Lower --pp or pipeline.chunks to at most {units} chunks, or raise model.layers.",
        )


def unit_seconds(
    units: Sequence[Unit],
    x: Any,
    loss: Callable[[Any], Any],
    backend: Backend,
    arena: Arena,
    stored: Any,
    computed: Any,
    clock: Callable[[], float] = time.perf_counter,
    wanted: Sequence[int] | None = None,
) -> Iterator[UnitTime | None]:
    """Measure each unit's forward and backward on this rank.

    The last unit's time includes the loss. Units before the first trained tensor run no backward.
    Only one unit's parameters are in memory at a time.

    units     with complete layers, not sharded over ranks
    x         input of the first unit, in the backend's memory
    loss      (output of the last unit) -> the gradient of that output
    stored    dtype of the parameters' gradients
    computed  dtype of the layers' arithmetic
    wanted    indices of the units to measure; the others yield None
    """
    draw, frozen = np.random.default_rng(0), forward_only(units)
    now = Now(0, 0, len(x), True)

    def drawn(shape: tuple[int, ...], size: float) -> Any:
        return backend.from_host((size * draw.standard_normal(shape, np.float32)).astype(computed))

    for index, unit in enumerate(units):
        if wanted is not None and index not in wanted:
            x = None if index == len(units) - 1 else drawn(unit.layer.output_shape(x.shape), 1.0)
            yield None
            continue
        storage = Storage([replace(unit, tied={}, held={})], stored)
        (weights,) = storage.weights(
            *(drawn((length,), 0.02) for length in (storage.length, storage.frozen.length))
        )
        (gradients,), (leaves,) = storage.gradients(backend.zeros(storage.length, stored))
        end = loss if index == len(units) - 1 else None
        drawn_dy: Any = None if end else drawn(unit.layer.output_shape(x.shape), 1e-3)
        times: list[float] = []
        while len(times) < REPEATS or (_disagree(times) and len(times) < MOST):
            for leaf in leaves:
                leaf.filled = False
            backend.synchronize()
            start = clock()
            y, saved = unit.layer.forward(weights, x, now, arena)
            dy = end(y) if end else drawn_dy
            if index >= frozen:
                _, pending = unit.layer.backward_input(weights, dy, saved, arena)
                unit.layer.backward_weight(pending, gradients, arena)
                del pending
            backend.synchronize()
            times.append(clock() - start)
            del saved, dy
        yield UnitTime(min(times), _disagree(times))
        x = y


def _disagree(times: Sequence[float]) -> bool:
    fastest, second = sorted(times)[:2]
    return second > AGREE * fastest


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
