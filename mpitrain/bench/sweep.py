"""One benchmark run: sizes x algorithms, each timed, checked and compared with the model."""

import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Backend, backend_for, on_device
from mpitrain.bench.operations import OPERATIONS, Buffers, Operation, filled, lossy
from mpitrain.collectives.agree import check_name, everywhere
from mpitrain.collectives.arithmetic import Arithmetic
from mpitrain.collectives.bind import chosen_by_model, memory_of
from mpitrain.collectives.choose import candidates
from mpitrain.collectives.cost import Tuning, predict
from mpitrain.collectives.execute import Execution, Reduction
from mpitrain.collectives.on_kernels import arithmetic_of
from mpitrain.collectives.wire import Wire
from mpitrain.errors import ConfigError
from mpitrain.transport.agree import agreed
from mpitrain.transport.base import Transport, aligned_zeros
from mpitrain.transport.proof import over_device

ROUNDING = {"fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 254}
"""Of one coding, relative to the largest number."""

ROUNDED = {"float16": 2**-11, "bfloat16": 2**-8}
"""Of one sum, relative to it, where it is more than 1 over this: up to there whole numbers are exact. 14 ranks get beyond."""

SECONDS = 0.25
"""Time given to one row when the number of iterations is not set."""


class Request(NamedTuple):
    """What to measure.

    algorithms  names; none for all that can run here
    iterations  timed runs per row; 0: as many as fit in SECONDS, from 5 to 500
    warmup      runs before those, at least 1
    buffers     where the arrays lie: "window" (shared by the ranks of a host, as in training) or "plain"
    wires       lossy formats to measure beside the algorithms of an all-reduce
    sweeps      times that the whole list is gone through, so that rows to compare alternate
    device      kind of the device whose memory holds the arrays and whose kernels reduce them
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
    device: str = "cpu"


class Bench(NamedTuple):
    """What all rows of a request are measured with."""

    request: Request
    tuning: Tuning
    transport: Transport
    backend: Backend
    arithmetic: Arithmetic


class Subject(NamedTuple):
    """What one row is about: its name in the table, and how it is bound. The wire is "none" for exact operations."""

    name: str
    operation: Operation
    wire: Wire


class Case(NamedTuple):
    """What all rows of one size start from, and what a run must leave in this part of the array."""

    original: Any
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
    """Bytes from least to most, each `factor` times the one before; ConfigError if there are none."""
    if not 1 <= least <= most:
        raise ConfigError(f"Sizes go from the smallest array (at least 1 byte) to the largest, but these are {least} and {most}.",
                          "Set --min-bytes and --max-bytes.")
    found, size = [], float(least)
    while size <= most * 1.000001:
        found.append(round(size))
        size *= factor
    return found


def sweep(transport: Transport, request: Request, tuning: Tuning) -> Iterator[Row]:
    """Rows as they are measured; the same ones on every rank. Collective.

    raises  ConfigError on every rank, before anything is measured, for what this machine or MPI cannot do
    """
    backend, arithmetic = agreed(transport, lambda: _device(request))
    bench = Bench(request, tuning, over_device(transport, backend, "auto"), backend, arithmetic)
    operation = OPERATIONS[request.operation]
    subjects = [Subject(algorithm, operation, Wire("none")) for algorithm in _algorithms(bench)]
    subjects += [Subject(f"wire {wire.name}" + f":{wire.amount:g}" * (wire.amount > 0), lossy(wire), wire)
                 for wire in request.wires]
    n, itemsize = transport.size, request.dtype.itemsize
    counts = list(dict.fromkeys(max(1, size // itemsize // n) * n for size in request.sizes))
    pools = dict(_pool(bench, operation, where, max(counts)) for where in request.buffers)
    return _rows(bench, subjects, counts, pools)


def _device(request: Request) -> tuple[Backend, Arithmetic]:
    """What computes; ConfigError where it is missing."""
    backend = backend_for(request.device)
    if request.device == "cuda" and request.dtype.name == "bfloat16":
        raise ConfigError("CuPy has no bfloat16.", "Measure --dtype float16, which is as long.")
    return backend, arithmetic_of(backend, backend.arena())


def _algorithms(bench: Bench) -> Sequence[str]:
    """The algorithms asked for; ConfigError on every rank for one that cannot run here."""
    request, transport = bench.request, bench.transport
    known, refused = OPERATIONS[request.operation].algorithms, {}
    if request.operation == "allreduce":
        known = (*known, "auto")
        able = candidates(transport.hosts, request.dtype.name in transport.native_dtypes)
        needs = {"native": f"needs a dtype that MPI reduces, which {request.dtype} is not",
                 "shared": "needs all ranks on one host"}
        refused = {name: why for name, why in needs.items() if name not in able}
    for name in request.algorithms:
        if name in refused:
            raise everywhere(ConfigError(f"{request.operation} algorithm {name} {refused[name]}.", "Leave it out."))
    return request.algorithms or [name for name in known if name not in refused]


def _pool(bench: Bench, operation: Operation, where: str, count: int) -> tuple[str, Buffers]:
    """Arrays that every size is a part of, and where they came to lie: there may be no room for a window, or no need."""
    transport, dtype = bench.transport, bench.request.dtype
    plain = bench.backend.zeros if bench.request.device == "cuda" else aligned_zeros
    make = transport.allocate if where == "window" else plain
    pool = Buffers(make(count, dtype), make(count if operation is OPERATIONS["all-to-all"] else 0, dtype))
    return ("device" if on_device(pool.array) else memory_of(transport, pool.array)), pool


def _rows(bench: Bench, subjects: Sequence[Subject], counts: Sequence[int], pools: dict[str, Buffers]) -> Iterator[Row]:
    request, transport = bench.request, bench.transport
    for _ in range(request.sweeps):
        for count in counts:
            part, right = subjects[0].operation.right(transport, count)
            original = bench.backend.from_host(filled(transport.rank, count).astype(request.dtype))
            case = Case(original, part, right.astype(request.dtype))
            for subject in subjects:
                for where, pool in pools.items():
                    yield _measure(bench, subject, where, Buffers(pool.array[:count], pool.other[:count]), case)


def _measure(bench: Bench, subject: Subject, where: str, buffers: Buffers, case: Case) -> Row:
    request, tuning, transport, backend, arithmetic = bench
    algorithm, operation, wire = subject
    count, dtype, n = buffers.array.size, request.dtype, transport.size
    chosen = chosen_by_model(transport, buffers.array, tuning) if algorithm == "auto" else algorithm
    buffers.other[:] = case.original[:buffers.other.size]
    reduction = operation.bind(transport, buffers, chosen, arithmetic)
    if chosen == "shared" and isinstance(reduction, Execution):
        chosen = "ring"  # there is no room for a window
    cycles, _ = _timed(bench, reduction, buffers.array, case.original, request.warmup)
    spent = max(transport.gather_text(cycles.min()))
    iterations = request.iterations or int(min(500, max(5, SECONDS / spent)))
    _, times = _timed(bench, reduction, buffers.array, case.original, iterations)
    transport.native_all_reduce(times, "maximum")
    slowest = times / operation.ways * 1e6
    wrong = wrong_elements(transport, backend.to_host(buffers.array[case.part]), case.right, wire)
    median, nbytes = float(np.median(slowest)), count * dtype.itemsize
    predicted = np.nan
    if wire.name == "none" and request.device == "cpu":
        predicted = predict(tuning, request.operation, chosen, transport.hosts, count, dtype.itemsize, where) * 1e6
    return Row(request.operation, algorithm, where, nbytes, count, dtype.name, n, median, float(slowest.min()),
               float(np.percentile(slowest, 99)), nbytes / median / 1e3, nbytes / median / 1e3 * operation.bus(n),
               predicted, wrong, chosen)


def wrong_elements(transport: Transport, found: np.ndarray, right: np.ndarray, wire: Wire) -> int:
    """Elements, over all ranks, that are not what they must be: not near it, or not on all ranks alike, for a wire format."""
    if wire.name == "none":
        is_right = found == right
        if rounded := ROUNDED.get(found.dtype.name):
            found, right = found.astype(np.float64), right.astype(np.float64)
            is_right |= (right * rounded > 1) & (np.abs(found - right) <= transport.size * rounded * right)
        return sum(transport.gather_text(int((~is_right).sum())))
    if len(set(transport.gather_text(zlib.crc32(found)))) > 1:
        return found.size * transport.size
    bound = ROUNDING.get(wire.name, np.inf) * transport.size * (right.max() + 1)
    return sum(transport.gather_text(int((~(np.abs(found - right) <= bound)).sum())))


def _timed(bench: Bench, reduction: Reduction, array: Any, original: Any, runs: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each run on this rank, with and without what comes before it: the same data, and all ranks ready."""
    ends, times, wait = np.empty(runs + 1), np.empty(runs), bench.backend.synchronize
    ends[0] = time.perf_counter()
    for run in range(runs):
        array[:] = original
        wait()
        bench.transport.barrier()
        start = time.perf_counter()
        reduction.run()
        wait()
        ends[run + 1] = time.perf_counter()
        times[run] = ends[run + 1] - start
    return np.diff(ends), times
