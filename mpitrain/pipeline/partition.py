"""The partition of a model's units into chunks: balanced, or explicit."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit, parameters_of

TIME = "time"
"""The value of `pipeline.partition` for measured times; the code that builds a run replaces it."""


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
    """Return the units of each chunk, and the tied tensors that several stages hold.

    The second result maps a tied tensor's full name to its stages. Each of these stages stores the
    tensor in its first unit that uses it. The layer that gives the tensor its name describes it.
    The gradient is the sum over the stages. The first stage owns the tensor; the others have
    copies.

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
    """Return the cuts, from 0 to `units`, with the least joint cost: exact, by dynamic programming.

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
    """Raise ConfigError if there are fewer units than chunks."""
    if units < chunks:
        raise ConfigError(
            f"Every chunk of a pipeline needs a unit of the model, but there are {units} units for {chunks} chunks "
            "(stages x chunks).",
            f"Lower --pp or pipeline.chunks to at most {units} chunks, or raise model.layers.",
        )
