"""Seconds of the units of a model on one rank: timed at several sizes, kept in a file, interpolated."""

import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mpitrain.data import Unopened
from mpitrain.errors import ConfigError
from mpitrain.files import text_of
from mpitrain.machine import process
from mpitrain.run.build import unit_times
from mpitrain.run.count.step import Counter
from mpitrain.run.job import Job
from mpitrain.strict_json import validated
from mpitrain.tools.plan.unit_counts import unit_counts

MOST_LAYERS, MOST_TOKENS = 2, 4096
"""Layers and vocabulary of a timed model: all layers of a kind take equally long, and so does each token of the
vocabulary in a head.
"""
MOST_FLOPS = 4e10
"""FLOPs of a timed pass: about half a second on a core. Units of more are extrapolated from fewer tokens."""
SIZES = (8.0, 1.0, 1 / 4, 1 / 16, 1 / 64, 1 / 256)
"""Rows of the timed micro-batches, the largest first; less than one: a row of so much of the context."""
OF_KIND = 2
"""Sizes at which `plan layout` times each kind of unit."""


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
    is_doubtful: bool = False

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

    def doubtful(self) -> list[str]:
        """Return the kinds of units whose passes took unequally long: other work disturbed them."""
        return [*dict.fromkeys(row.unit for row in self.rows if row.is_doubtful)]

    @property
    def rate(self) -> float:
        """Return the FLOPs per second of the largest timed unit of each kind."""
        most = {row.unit: row for row in sorted(self.rows, key=lambda row: row.size)}.values()
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


def timed(job: Job, every: Sequence[int], others: int) -> Iterator[TimedUnit]:
    """Time one unit of each kind of a job's model for micro-batches of so many rows each.

    job     of one rank, with one micro-batch and without recomputation
    others  ranks that compute on this host at the same time
    """
    with at_work(others):
        for rows in every:
            sized = _Sized.of(job, rows)
            wanted = [*{each: n for n, each in reversed([*enumerate(sized.sizes())])}.values()]
            yield from sized.timed(wanted)


def timed_quickly(job: Job, others: int) -> Iterator[tuple[float, list[TimedUnit]]]:
    """Time one unit of each kind, at the largest sizes of at most MOST_FLOPS.

    Yields the fraction that is done with the rows of a size. Arguments as of `timed`.
    """
    left: dict[str, int] = {}
    every = [rows for rows in SIZES if rows >= 1 or job.source.form == "tokens"]
    with at_work(others):
        for done, rows in enumerate(every, 1):
            sized = _Sized.of(job, rows)
            wanted: dict[str, int] = {}
            for index, (kind, flops, _) in enumerate(sized.sizes()):
                fits = flops <= MOST_FLOPS or rows == every[-1]
                if fits and left.setdefault(kind, OF_KIND):
                    wanted.setdefault(kind, index)
            for kind in wanted:
                left[kind] -= 1
            yield done / len(every), [*sized.timed([*wanted.values()])] if wanted else []
            if len(left) == len({kind for kind, *_ in sized.sizes()}) and not any(left.values()):
                return


class _Sized(NamedTuple):
    """A job of few layers, whose micro-batch has some rows or a part of one.

    counter  counts its units
    """

    job: Job
    counter: Counter

    @classmethod
    def of(cls, job: Job, rows: float) -> "_Sized":
        settings: dict[str, int] = {
            "model.layers": min(job.config.model.layers, MOST_LAYERS),
            "batch.size": max(1, int(rows)),
        }
        source = job.source
        if source.form == "tokens":
            (context,) = source.shape
            if rows < 1:
                settings["model.context"] = context = max(2, int(rows * context))
            tokens = min(source.inputs, MOST_TOKENS)
            source = Unopened(source.form, (context,), tokens, min(source.classes, tokens))
        job = replace(job, config=job.config.changed(settings), source=source)
        return cls(job, Counter(job))

    def sizes(self) -> list[tuple[str, int, int]]:
        """Return the kind, the FLOPs and the elements of the output of each unit."""
        shape, sizes = (
            (self.job.config.batch.size, *self.job.source.shape),
            list[tuple[str, int, int]](),
        )
        for unit, counted in zip(self.counter.model, unit_counts(self.counter, 0), strict=True):
            shape = unit.layer.output_shape(shape)
            sizes.append((kind_of(unit.name), counted.flops, math.prod(shape)))
        return sizes

    def timed(self, wanted: Sequence[int]) -> Iterator[TimedUnit]:
        rows = self.job.config.batch.size
        times = unit_times(self.job, wanted)
        for (kind, flops, elements), time in zip(self.sizes(), times, strict=True):
            if time:
                yield TimedUnit(kind, rows, flops, elements, time.seconds, time.is_doubtful)


PRODUCTS = """
import select, sys
import numpy
a = numpy.ones((384, 384), "f4")
while not select.select([sys.stdin], [], [], 0)[0]:
    a @ a
"""


@contextmanager
def at_work(others: int) -> Iterator[None]:
    """Keep other cores at work: units of ranks of one host are slower together than alone.

    others  processes that multiply matrices meanwhile, each with the BLAS threads of this one
    """
    command = (sys.executable, "-P", "-c", PRODUCTS)  # -P: no numpy.py of the current folder
    with ExitStack() as running:
        for _ in range(others):
            # Its input ends with this process, whatever ends that.
            child = running.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
            running.callback(child.kill)
        yield


def facts_of(job: Job, threads: int) -> dict[str, Any]:
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
