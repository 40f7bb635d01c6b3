"""One benchmark run: sizes x algorithms, each timed, checked and compared with the model."""

import time
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.bench.operations import OPERATIONS, Buffers, Operation, filled, lossy
from mpitrain.collectives.agree import check_name
from mpitrain.collectives.choose import choose
from mpitrain.collectives.cost import Tuning, predict
from mpitrain.collectives.execute import Reduction
from mpitrain.collectives.wire import Wire
from mpitrain.transport.base import Transport, aligned_zeros

ROUNDING = {"fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 254}
"""Of one coding, relative to the largest number."""

SECONDS = 0.25
"""Time given to one row when the number of iterations is not set."""


class Request(NamedTuple):
    """What to measure.

    iterations  timed runs per row; 0: as many as fit in SECONDS, from 5 to 500
    warmup      runs before those, at least 1
    buffers     where the arrays lie: "window" (shared by the ranks of a host, as in training) or "plain"
    wires       lossy formats to measure beside the algorithms of an all-reduce
    sweeps      times that the whole list is gone through, so that rows to compare alternate
    """

    operation: str
    algorithms: Sequence[str]
    sizes: Sequence[int]
    dtype: np.dtype
    iterations: int
    warmup: int
    buffers: Sequence[str]
    sweeps: int
    wires: Sequence[Wire] = ()


class Subject(NamedTuple):
    """What one row is about: its name in the table, and how it is bound. The wire is "none" for exact operations."""

    name: str
    operation: Operation
    wire: Wire


class Case(NamedTuple):
    """What all rows of one size start from, and what a run must leave in this part of the array."""

    original: np.ndarray
    part: slice
    right: np.ndarray


class Row(NamedTuple):
    """One measurement. Times are those of the slowest rank, per run; of one way for a ping-pong."""

    op: str
    algorithm: str
    buffers: str
    bytes: int
    count: int
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


def dtype_of(name: str) -> np.dtype:
    """A dtype by name; ConfigError for one that cannot be reduced."""
    check_name("dtype", name, ("float32", "float64", "float16", "bfloat16", "int32"))
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401  registers the name with NumPy
    return np.dtype(name)


def sizes(least: int, most: int, factor: float) -> list[int]:
    """Bytes from least to most, each `factor` times the one before."""
    found, size = [], float(least)
    while size <= most * 1.000001:
        found.append(round(size))
        size *= factor
    return found


def sweep(transport: Transport, request: Request, tuning: Tuning) -> Iterator[Row]:
    """Rows as they are measured; the same ones on every rank. Collective."""
    operation = OPERATIONS[request.operation]
    subjects = [Subject(algorithm, operation, Wire("none")) for algorithm in request.algorithms]
    subjects += [Subject(f"wire {wire.name}", lossy(wire), wire) for wire in request.wires]
    counts = [max(1, size // request.dtype.itemsize // transport.size) * transport.size for size in request.sizes]
    pools = {where: _buffers(transport, operation, where, max(counts), request.dtype) for where in request.buffers}
    for _ in range(request.sweeps):
        for count in counts:
            part, right = operation.right(transport, count)
            case = Case(filled(transport.rank, count).astype(request.dtype), part, right.astype(request.dtype))
            for subject in subjects:
                for where, pool in pools.items():
                    buffers = Buffers(pool.array[:count], pool.other[:count])
                    yield _measure(transport, request, subject, where, buffers, case, tuning)


def _buffers(transport: Transport, operation: Operation, where: str, count: int, dtype: np.dtype) -> Buffers:
    """Arrays that every size is a part of."""
    make = transport.allocate if where == "window" else aligned_zeros
    return Buffers(make(count, dtype), make(count if operation is OPERATIONS["all-to-all"] else 0, dtype))


def _measure(transport: Transport, request: Request, subject: Subject, where: str, buffers: Buffers, case: Case,
             tuning: Tuning) -> Row:
    algorithm, operation, wire = subject
    count, dtype, n = buffers.array.size, request.dtype, transport.size
    chosen = algorithm
    if algorithm == "auto":
        is_native = dtype.name in transport.native_dtypes
        chosen = choose(tuning, transport.hosts, count, dtype.itemsize, is_native, in_window=where == "window")
    buffers.other[:] = case.original[:buffers.other.size]
    reduction = operation.bind(transport, buffers, chosen)
    start = time.perf_counter()
    _timed(transport, reduction, buffers.array, case.original, request.warmup)
    spent = max(transport.gather_text(time.perf_counter() - start)) / request.warmup
    iterations = request.iterations or int(min(500, max(5, SECONDS / spent)))
    times = _timed(transport, reduction, buffers.array, case.original, iterations)
    slowest = np.max(transport.gather_text(times.tolist()), axis=0) / operation.ways * 1e6
    wrong = wrong_elements(transport, buffers.array[case.part], case.right, wire)
    median, nbytes = float(np.median(slowest)), count * dtype.itemsize
    modelled = "shared-copied" if (chosen, where) == ("shared", "plain") else chosen
    predicted = np.nan
    if wire.name == "none":
        predicted = predict(tuning, request.operation, modelled, transport.hosts, count, dtype.itemsize) * 1e6
    return Row(request.operation, algorithm, where, nbytes, count, dtype.name, n, median, float(slowest.min()),
               float(np.percentile(slowest, 99)), nbytes / median / 1e3, nbytes / median / 1e3 * operation.bus(n),
               predicted, wrong, chosen)


def wrong_elements(transport: Transport, found: np.ndarray, right: np.ndarray, wire: Wire) -> int:
    """Elements, over all ranks, that are not what they must be: not near it, or not on all ranks alike, for a wire format."""
    if wire.name == "none":
        return sum(transport.gather_text(int((~(found == right)).sum())))
    if len(set(transport.gather_text(zlib.crc32(found)))) > 1:
        return found.size * transport.size
    bound = ROUNDING.get(wire.name, np.inf) * transport.size * (right.max() + 1)
    return sum(transport.gather_text(int((~(np.abs(found - right) <= bound)).sum())))


def _timed(transport: Transport, reduction: Reduction, array: np.ndarray, original: np.ndarray, runs: int) -> np.ndarray:
    """Seconds of each run on this rank. Every run starts from the same data, and when all ranks are ready."""
    times = np.empty(runs)
    for run in range(runs):
        array[:] = original
        transport.barrier()
        start = time.perf_counter()
        reduction.run()
        times[run] = time.perf_counter() - start
    return times
