"""Seconds of the units of a model on one rank: timed at several sizes, kept in a file, interpolated."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mpitrain.data import Source
from mpitrain.errors import ConfigError
from mpitrain.files import text_of
from mpitrain.machine import process
from mpitrain.run.build import model, unit_times
from mpitrain.run.counting import Counter
from mpitrain.run.resolve import Resolved
from mpitrain.strict_json import validated

MOST_LAYERS = 2
"""Layers of a timed model: all layers of a kind take equally long."""


class TimedUnit(NamedTuple):
    """A unit of one rank in a micro-batch, forward and backward.

    unit      its kind: the last word of its name
    flops     of matrix products
    elements  of its output
    """

    unit: str
    rows: Annotated[int, Field(ge=1, le=1 << 31)]
    flops: Annotated[int, Field(ge=0, le=1 << 62)]
    elements: Annotated[int, Field(ge=1, le=1 << 62)]
    seconds: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]

    @property
    def size(self) -> int:
        return self.flops or self.elements


class UnitTimes(NamedTuple):
    """Timed units of one rank.

    facts  of the rank: its kind of device, its processor, the cores of its host, its BLAS threads
    rows   timed units
    """

    facts: dict[str, Any]
    rows: Sequence[TimedUnit]

    def points(self) -> dict[str, list[tuple[int, float]]]:
        """Return {kind of unit: (size, seconds)}, the smallest first."""
        of_kind: dict[str, list[tuple[int, float]]] = {}
        for (unit, size), same in groupby(
            sorted(self.rows, key=lambda row: (row.unit, row.size)),
            lambda row: (row.unit, row.size),
        ):
            of_kind.setdefault(unit, []).append((size, min(row.seconds for row in same)))
        return of_kind

    @property
    def rate(self) -> float:
        """Return the FLOPs per second of all units with the most rows."""
        most = [row for row in self.rows if row.rows == max(other.rows for other in self.rows)]
        return sum(row.flops for row in most) / sum(row.seconds for row in most)

    def turns(self, on_host: int) -> float:
        """Return how many ranks take turns on a core, if a host has so many. On a GPU they do not."""
        threads, cores = self.facts["threads"], self.facts["cores"]
        return max(1.0, on_host * threads / cores) if self.facts["device"] == "cpu" else 1.0


def seconds_of(points: Sequence[tuple[int, float]], size: float) -> float:
    """Interpolate between sizes.

    Below the smallest, a unit takes the fixed time that the first two show; above the largest the
    time is proportional.
    """
    (low, first), (high, last) = points[0], points[-1]
    if size >= high or len(points) == 1:
        return last * size / high
    if size <= low:
        next_size, second = points[1]
        fixed = min(first, max(0.0, first - (second - first) / (next_size - low) * low))
        return fixed + (first - fixed) * size / low
    at = next(n for n, (upper, _) in enumerate(points) if size < upper)
    (low, first), (high, last) = points[at - 1 : at + 1]
    return first + (last - first) * (size - low) / (high - low)


def kind_of(name: str) -> str:
    """Return the kind of a unit from its name: `blocks.3.mlp` is an mlp, `hidden.2` a hidden."""
    return next(word for word in reversed(name.split(".")) if not word.isdigit())


def timed(job: Resolved, source: Source, every: Sequence[int]) -> Iterator[TimedUnit]:
    """Time the units of a job's model for micro-batches of so many rows each.

    job  of one rank, with one micro-batch and without recomputation
    """
    layers = min(job.config.model.layers, MOST_LAYERS)
    for rows in every:
        config = job.config.changed({"model.layers": layers, "batch.size": rows})
        part = job._replace(config=config)
        counter = Counter(part, source, lambda made, c=config: model(c, source, made))  # type: ignore[misc]
        counts, shape = counter.units(0), (rows, *source.shape)
        for unit, counted, seconds in zip(
            counter.model, counts, unit_times(part, source), strict=True
        ):
            shape = unit.layer.output_shape(shape)
            yield TimedUnit(kind_of(unit.name), rows, counted.flops, math.prod(shape), seconds)


def facts_of(job: Resolved, threads: int) -> dict[str, Any]:
    """Describe the rank that times units with this number of BLAS threads."""
    kernels = job.device.kernels
    return {
        "device": job.device.kind,
        "processor": kernels.engine.name if kernels else process.processor().name,
        "cores": process.processors(),
        "threads": threads,
    }


class _RankFacts(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    device: str
    processor: str
    cores: Annotated[int, Field(ge=1, le=1 << 20)]
    threads: Annotated[int, Field(ge=1, le=1 << 20)]


class _UnitsFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    header: _RankFacts
    rows: Annotated[list[TimedUnit], Field(min_length=1)]


def read_units(path: Path) -> UnitTimes:
    """Read the file of `bench units`; ConfigError if it is none."""
    way_out = "mpitrain bench units writes one."
    try:
        file = validated(_UnitsFile, text_of(path))
    except OSError as error:
        raise ConfigError(f"The units {path} cannot be read: {error.strerror}.", way_out) from None
    except ValueError as error:
        raise ConfigError(f"{path} is no file of units: {error}.", way_out) from None
    if not any(row.flops for row in file.rows):
        raise ConfigError(f"{path} is no file of units: none has FLOPs.", way_out)
    return UnitTimes(file.header.model_dump(), file.rows)
