"""A sweep over sizes and algorithms: rows are timed, verified and compared with the cost model."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpitrain.bench.collectives.buffers import LEASED, Bound, Leased, Staying
from mpitrain.bench.collectives.native import names, operation_of, refusals
from mpitrain.bench.collectives.operations import Buffers, Operation, Way, lossy
from mpitrain.bench.collectives.request import SweepRequest
from mpitrain.bench.collectives.synchronized_start import starting_line
from mpitrain.bench.collectives.verify import error_norm, wrong_elements, wrong_replicas
from mpitrain.collectives.bind import memory_of
from mpitrain.collectives.engine.arithmetic import Arithmetic
from mpitrain.collectives.engine.codecs import Wire
from mpitrain.collectives.engine.device_arithmetic import arithmetic_of
from mpitrain.collectives.group import Group
from mpitrain.collectives.plans.topology import Topology
from mpitrain.collectives.selection.cost_model import Tuning, predict
from mpitrain.collectives.selection.table import choices
from mpitrain.errors import ConfigError, on_every_rank
from mpitrain.machine.backend import Backend, on_device
from mpitrain.ops.device import device_for
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport, aligned_zeros
from mpitrain.transport.device.cuda_aware import over_device

SECONDS = 0.25
"""Time of the runs of one row, if the number of iterations is not set."""

LONG, LONGEST = 0.05, 1.0
"""Seconds per run of the fastest algorithm above which a sweep ends.

Above LONG it ends if time has grown in proportion to the array; above LONGEST it always ends.
"""


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
    operation: Operation
    wire: Wire


class Case(NamedTuple):
    """The data that all rows of one size share.

    original  input of this rank
    part      region of the array that has the result
    right     expected values in this region
    """

    original: Any
    part: slice
    right: np.ndarray


class Row(NamedTuple):
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


class Sweep:
    """An iterator over rows as they are measured.

    total  upper bound of the number of rows: `stops` in the request may end the sweep early
    """

    def __init__(self, total: int, rows: Iterator[Row]):
        self.total, self._rows = total, rows

    def __iter__(self) -> Iterator[Row]:
        return self._rows


def sweep(transport: Transport, request: SweepRequest, tuning: Tuning) -> Sweep:
    """Return an iterator that measures the rows; every rank gets the same rows. Collective.

    raises  ConfigError on every rank, before any measurement, if the machine or MPI lacks support
    """
    device = on_all_ranks(transport, lambda: device_for(request.device))
    bench = Bench(
        request,
        tuning,
        over_device(transport, device.backend, "auto"),
        device.backend,
        arithmetic_of(device),
    )
    subjects = [
        Subject(algorithm, operation_of(request.operation, algorithm), Wire("none"))
        for algorithm in _algorithms(bench)
    ]
    subjects += [
        Subject(f"wire {wire.name}" + f":{wire.amount:g}" * (wire.amount > 0), lossy(wire), wire)
        for wire in request.wires
    ]
    n, itemsize = transport.size, request.dtype.itemsize
    counts = list(dict.fromkeys(max(1, size // itemsize // n) * n for size in request.sizes))
    other = max(subject.operation.other(n, max(counts)) for subject in subjects)
    pools = dict(_pool(bench, where, max(counts), other) for where in request.buffers)
    return Sweep(
        request.sweeps * len(counts) * len(subjects) * len(pools),
        _rows(bench, subjects, counts, pools),
    )


def _algorithms(bench: Bench) -> Sequence[str]:
    """Return the requested algorithms; ConfigError on every rank if one cannot run here."""
    request, transport = bench.request, bench.transport
    known, dtype = names(request.operation), request.dtype.name
    situation = Topology(
        transport.hosts, dtype, dtype in transport.native_dtypes, request.device == "cuda"
    )
    refused = refusals(request.operation, situation)
    for name in request.algorithms:
        if name in refused:
            raise on_every_rank(
                ConfigError(f"{request.operation} {refused[name].law}", "Leave it out.")
            )
    return request.algorithms or [name for name in known if name not in refused]


def _pool(bench: Bench, where: str, count: int, other: int) -> tuple[str, Buffers | None]:
    """Allocate arrays of `count` and `other` elements for all sizes; return their class and them.

    The class of memory differs from `where` if a window has no room or is not needed.
    """
    if where == LEASED:
        return where, None
    transport, dtype = bench.transport, bench.request.dtype
    plain = bench.backend.zeros if bench.request.device == "cuda" else aligned_zeros
    make = transport.allocate if where == "window" else plain
    pool = Buffers(make(count, dtype), make(other, dtype))
    return ("device" if on_device(pool.array) else memory_of(transport, pool.array)), pool


def _rows(
    bench: Bench,
    subjects: Sequence[Subject],
    counts: Sequence[int],
    pools: dict[str, Buffers | None],
) -> Iterator[Row]:
    operations = {subject.operation.fill: subject.operation for subject in subjects}
    for sweep_number in range(1, bench.request.sweeps + 1):
        before = fastest = math.inf
        for index, count in enumerate(counts):
            before, fastest = fastest, math.inf
            cases = {fill: _case(bench, operation, count) for fill, operation in operations.items()}
            for subject in subjects:
                for where, pool in pools.items():
                    try:
                        row = _row(
                            bench, subject, where, pool, cases[subject.operation.fill], sweep_number
                        )
                    except ConfigError:  # there is no room for its window
                        if bench.request.algorithms:
                            raise
                        continue
                    fastest = min(fastest, row.time_us * 1e-6)
                    yield row
            if bench.request.stops and is_long_enough(fastest, before, count / counts[index - 1]):
                counts = counts[: index + 1]
                break


def is_long_enough(fastest: float, before: float, growth: float) -> bool:
    """Return whether longer arrays need no measurement: see LONG and LONGEST.

    fastest, before  seconds of the fastest algorithm at this size and at the previous size
    growth           this size over the previous size
    """
    return fastest > LONGEST or (fastest > LONG and fastest > 0.9 * growth * before)


def _case(bench: Bench, operation: Operation, count: int) -> Case:
    part, right = operation.right(bench.transport, count)
    dtype = bench.request.dtype
    return Case(
        bench.backend.from_host(operation.fill(bench.transport.rank, count).astype(dtype)),
        part,
        right.astype(dtype),
    )


def _row(
    bench: Bench, subject: Subject, where: str, pool: Buffers | None, case: Case, sweep_number: int
) -> Row:
    """Bind the algorithm, measure a row, and release the binding."""
    request, tuning, transport, backend, arithmetic = bench
    count = case.original.size
    if pool:
        operation = subject.operation
        array, other = pool.array[:count], pool.other[: operation.other(transport.size, count)]
        other[:] = case.original[: other.size]
        reduction = operation.bind(
            transport, Buffers(array, other), Way(subject.name, tuning, arithmetic)
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
            bench, subject, where, Leased(group, count, request.dtype), case, sweep_number
        )
    except ConfigError:  # every rank raises it
        own.close()
        raise
    own.close()
    return row


def _measure(
    bench: Bench, subject: Subject, where: str, bound: Bound, case: Case, sweep_number: int
) -> Row:
    request, tuning, transport, backend, _ = bench
    algorithm, operation, wire = subject
    count, dtype, n = case.original.size, request.dtype, transport.size
    chosen = bound.algorithm or algorithm
    timed = partial(_timed, bench, starting_line(transport), bound, case.original)
    cycles, _ = timed(1)
    error = (
        math.nan if wire.name == "none" else error_norm(backend.to_host(bound.array), case.right)
    )
    if request.warmup > 1:
        cycles, _ = timed(request.warmup - 1)
    spent = max(transport.gather_text(cycles.min()))
    iterations = request.iterations or int(min(500, max(5, SECONDS / spent)))
    _, times = timed(iterations)
    transport.native_all_reduce(times, "maximum")
    slowest = times / operation.ways * 1e6
    found = backend.to_host(bound.result)
    wrong = (
        wrong_elements(transport, found, case.right)
        if wire.name == "none"
        else wrong_replicas(transport, found)
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
    return Row(
        request.operation,
        algorithm,
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
