"""One row of a sweep: an algorithm is bound, timed, verified and compared with the cost model."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.engine.arithmetic import Arithmetic, Wire
from mpitrain.collectives.group import Group
from mpitrain.collectives.selection.algorithm import shown
from mpitrain.collectives.selection.cost_model import Tuning, predict
from mpitrain.collectives.selection.table import choices
from mpitrain.errors import ConfigError
from mpitrain.machine.backend import Backend
from mpitrain.tools.bench.collectives.buffers import LEASED, Bound, LeasedAllReduce, Staying
from mpitrain.tools.bench.collectives.operations import BenchedCollective, Buffers, ReductionOptions
from mpitrain.tools.bench.collectives.request import SweepRequest
from mpitrain.tools.bench.collectives.synchronized_start import starting_line
from mpitrain.tools.bench.collectives.verify import error_norm, wrong_elements, wrong_replicas
from mpitrain.transport.base import Transport

SECONDS = 0.25
"""Time of the runs of one row, if the number of iterations is not set."""

LONGEST = 1.0
"""Seconds of a run above which a request that `stops` has no further warm-up, and one timed run."""


class Bench(NamedTuple):
    """The context that all rows of a request share."""

    request: SweepRequest
    tuning: Tuning
    transport: Transport
    backend: Backend
    arithmetic: Arithmetic


class Subject(NamedTuple):
    """The algorithm of a row: its name in the table, its operation and its wire format.

    wire  "none" for exact operations
    """

    name: str
    operation: BenchedCollective
    wire: Wire


class SizeCase(NamedTuple):
    """The data that all rows of one size share.

    original  input of this rank
    part      region of the array that has the result
    right     expected values in this region
    """

    original: Any
    part: slice
    right: np.ndarray


class CollectiveRow(NamedTuple):
    """One measurement. Times are per run, on the slowest rank; of a ping-pong, half a round trip.

    wrong   wrong elements; for a wire format, replicas that differ
    chosen  algorithm that was bound: the choice of `auto`, or `ring` where a window has no room
    sweep   number of the sweep, from 1
    error   for a wire format, norm of the first run's error over the norm of the sum; else NaN
    """

    op: str
    algorithm: str
    buffers: str
    bytes: int
    count: int  # type: ignore[assignment]  # it hides tuple.count, which rows do not need
    dtype: str
    ranks: int
    time_us: float
    min_us: float
    p99_us: float
    algbw_GBs: float
    busbw_GBs: float
    predicted_us: float
    wrong: int
    chosen: str
    error: float
    sweep: int


def case_of(bench: Bench, operation: BenchedCollective, count: int) -> SizeCase:
    part, right = operation.right(bench.transport, count)
    dtype = bench.request.dtype
    return SizeCase(
        bench.backend.from_host(operation.fill(bench.transport.rank, count).astype(dtype)),
        part,
        right.astype(dtype),
    )


def measure_row(
    bench: Bench,
    subject: Subject,
    where: str,
    pool: Buffers | None,
    case: SizeCase,
    sweep_number: int,
) -> CollectiveRow:
    """Bind the algorithm, measure a row, and release the binding."""
    request, tuning, transport, backend, arithmetic = bench
    count = case.original.size
    if pool:
        operation = subject.operation
        array, other = pool.array[:count], pool.other[: operation.other(transport.size, count)]
        other[:] = case.original[: other.size]
        reduction = operation.bind(
            transport, Buffers(array, other), ReductionOptions(subject.name, tuning, arithmetic)
        )
        result = other if operation.is_in_other else array[case.part]
        return _measure(
            bench, subject, where, Staying(array, reduction, result), case, sweep_number
        )
    own = transport.split(0)
    assert own is not None
    group = Group(own, subject.name, tuning, arithmetic, backend.arena())
    try:
        row = _measure(
            bench, subject, where, LeasedAllReduce(group, count, request.dtype), case, sweep_number
        )
    except ConfigError:  # every rank raises it
        own.close()
        raise
    own.close()
    return row


def _measure(
    bench: Bench, subject: Subject, where: str, bound: Bound, case: SizeCase, sweep_number: int
) -> CollectiveRow:
    request, tuning, transport, backend, _ = bench
    algorithm, operation, wire = subject
    count, dtype, n = case.original.size, request.dtype, transport.size
    chosen = bound.algorithm or algorithm
    timed = partial(_timed, bench, starting_line(transport), bound, case.original)
    cycles, _ = timed(1)
    spent = max(transport.gather_text(cycles.min()))
    error = (
        math.nan if wire.name == "none" else error_norm(backend.to_host(bound.array), case.right)
    )
    is_once = request.stops and spent > LONGEST
    if request.warmup > 1 and not is_once:
        cycles, _ = timed(request.warmup - 1)
        spent = max(transport.gather_text(cycles.min()))
    iterations = request.iterations or int(min(500, max(1 if is_once else 5, SECONDS / spent)))
    _, times = timed(iterations)
    transport.native_all_reduce(times, "maximum")
    slowest = times / operation.ways * 1e6
    result = backend.to_host(bound.result)
    wrong = (
        wrong_elements(transport, result, case.right)
        if wire.name == "none"
        else wrong_replicas(transport, result)
    )
    median, nbytes = float(np.median(slowest)), count * dtype.itemsize
    predicted = np.nan
    is_modelled = chosen in choices(request.operation)  # MPI's own all-reduce is modelled, too
    if is_modelled and wire.name == "none" and request.device == "cpu" and where != LEASED:
        predicted = (
            predict(
                tuning, request.operation, chosen, transport.hosts, count, dtype.itemsize, where
            )
            * 1e6
        )
    return CollectiveRow(
        request.operation,
        shown(algorithm),
        where,
        nbytes,
        count,
        dtype.name,
        n,
        median,
        float(slowest.min()),
        float(np.percentile(slowest, 99)),
        nbytes / median / 1e3,
        nbytes / median / 1e3 * operation.bus(n),
        predicted,
        wrong,
        chosen,
        error,
        sweep_number,
    )


def _timed(
    bench: Bench, meet: Callable[[], None], bound: Bound, original: Any, runs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of each run on this rank, with and without its preparation.

    The preparation restores the input and waits until all ranks are ready.
    """
    ends, times, wait = np.empty(runs + 1), np.empty(runs), bench.backend.synchronize
    ends[0] = time.perf_counter()
    for run in range(runs):
        bound.renew()
        bound.array[:] = original
        wait()
        meet()
        start = time.perf_counter()
        bound.run()
        wait()
        ends[run + 1] = time.perf_counter()
        times[run] = ends[run + 1] - start
    return np.diff(ends), times
