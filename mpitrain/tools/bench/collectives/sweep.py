"""A sweep over sizes and algorithms of a collective: each is bound, timed and checked on all ranks."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.engine.arithmetic import Arithmetic, Wire, arithmetic_of
from mpitrain.collectives.engine.executor import check_name
from mpitrain.collectives.group import memory_of
from mpitrain.collectives.selection.algorithm import Topology
from mpitrain.collectives.selection.cost_model import Tuning, predict
from mpitrain.collectives.selection.own_algorithm import shown
from mpitrain.collectives.selection.table import choices
from mpitrain.errors import ConfigError
from mpitrain.machine.backend import Backend, on_device
from mpitrain.ops.device import device_for
from mpitrain.tools.bench.collectives.operations import (
    SKEWED,
    BenchedCollective,
    Buffers,
    ReductionOptions,
    error_norm,
    lossy,
    names,
    operation_of,
    refusals,
    wrong_elements,
    wrong_replicas,
)
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport, aligned_zeros
from mpitrain.transport.clocks import Clocks
from mpitrain.transport.device import over_device
from mpitrain.transport.native import native_all_reduce

SECONDS = 0.25
"""Time of the runs of one row, if the number of iterations is not set."""
LONGEST = 1.0
"""With `stops` in the request: a run that takes more seconds is timed once, without more warm-up."""
LONG = 0.05
"""Seconds per run of the fastest algorithm above which a sweep with `stops` leaves out longer arrays.

Above LONG it does so if the time has grown in proportion to the array; above LONGEST always.
"""
BUCKET = 25e6
"""Bytes of the largest bucket that a run without replication.bucket_mb is expected to have."""
ROUNDS = 5
"""Number of agreements on a start time that are timed, to find the longest one."""
MARGIN = 1.5
"""Factor on the longest agreement, which gives the delay from an agreement to the start.

After this delay all ranks know the start time.
"""


class SweepRequest(NamedTuple):
    """What a benchmark of one collective shall measure.

    algorithms  names; "all" among them, or none: all that can run on these ranks
    sizes       bytes of the arrays
    iterations  timed runs per row; 0: as many as fit in SECONDS, from 5 to 500
    warmup      untimed runs before the timed ones, at least 1
    buffers     memory of the arrays: "window" (shared by the ranks of a host, as in training) or
                "plain"
    wires       wire formats to measure beside the algorithms of an all-reduce
    stops       whether to end a sweep early: once the time grows in proportion to the size, only
                the largest bucket is still measured, and a long run is timed once
    sweeps      repetitions of the whole list, so that rows to compare alternate
    device      kind of the device that holds the arrays and reduces them
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
    stops: bool = False


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of this name; ConfigError if its arrays cannot be reduced."""
    check_name("dtype", name, ("float32", "float64", "float16", "bfloat16", "int32"))
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401  registers the name with NumPy
    return np.dtype(name)


def sizes(least: int, most: int, factor: float) -> list[int]:
    """Return sizes in bytes from `least` to `most`, each `factor` times the previous one.

    raises  ConfigError if the list would be empty or endless
    """
    if not 1.01 <= factor < math.inf:
        raise ConfigError(
            f"Sizes grow by a factor of 1.01 or more, but this is {factor:g}.",
            "Set --factor to 2 or 4.",
        )
    if not 1 <= least <= most:
        raise ConfigError(
            f"Sizes go from the smallest array (at least 1 byte) to the largest, but these are {least} and {most}.",
            "Set --min-bytes and --max-bytes.",
        )
    rounded, size = [], float(least)
    while size <= most * 1.000001:
        rounded.append(round(size))
        size *= factor
    return rounded


class CollectiveRow(NamedTuple):
    """One measurement. Times are per run, on the slowest rank; of a ping-pong, half a round trip.

    wrong   number of wrong elements; for a wire format, number of replicas that differ
    chosen  algorithm that ran: the choice of `auto`, or `ring` where a window has no room
    sweep   number of the sweep, from 1
    error   for a wire format, norm of the first run's error divided by the norm of the sum; else
            NaN
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


class Subject(NamedTuple):
    """An algorithm to measure.

    name  in the table
    wire  wire format; "none" for exact operations
    """

    name: str
    operation: BenchedCollective
    wire: Wire


class SizeCase(NamedTuple):
    """Input and expected result of all rows of one size.

    original  input of this rank
    part      region of the array with the result
    right     expected values in this region
    """

    original: Any
    part: slice
    right: np.ndarray


class Sweep:
    """An iterator that measures the rows; every rank gets the same rows.

    total  largest possible number of rows; `stops` in the request may end a sweep early
    """

    def __init__(self, transport: Transport, request: SweepRequest, tuning: Tuning):
        """Allocate the buffers that the rows share. Collective.

        raises  ConfigError on every rank, before any measurement, if a requested algorithm or
                device is not possible here
        """
        device = on_all_ranks(transport, lambda: device_for(request.device))
        self._request, self._tuning = request, tuning
        self._backend: Backend = device.backend
        self._transport = over_device(transport, device.backend, "auto")
        self._arithmetic: Arithmetic = arithmetic_of(device)
        self._subjects = [
            Subject(algorithm, operation_of(request.operation, algorithm), Wire("none"))
            for algorithm in self._algorithms()
        ]
        self._subjects += [
            Subject(
                f"wire {wire.name}" + f":{wire.amount:g}" * (wire.amount > 0), lossy(wire), wire
            )
            for wire in request.wires
        ]
        n, itemsize = transport.size, request.dtype.itemsize
        self._counts = list(
            dict.fromkeys(max(1, size // itemsize // n) * n for size in request.sizes)
        )
        most = max(self._counts)
        other = max(subject.operation.other(n, most) for subject in self._subjects)
        self._pools = dict(self._pool(where, most, other) for where in request.buffers)
        self.total = request.sweeps * len(self._counts) * len(self._subjects) * len(self._pools)

    def _algorithms(self) -> Sequence[str]:
        request, transport = self._request, self._transport
        dtype = request.dtype.name
        situation = Topology(
            transport.hosts, dtype, dtype in transport.native_dtypes, request.device == "cuda"
        )
        refused = refusals(request.operation, situation)
        for name in request.algorithms:
            if name in refused:
                raise ConfigError(
                    f"{request.operation} {refused[name].law}", "Leave it out."
                ).on_every_rank()
        able = [name for name in names(request.operation) if name not in refused]
        asked = request.algorithms or ["all"]
        listed = [able if name == "all" else [name] for name in asked]
        return [*dict.fromkeys(chain.from_iterable(listed))]

    def _pool(self, where: str, count: int, other: int) -> tuple[str, Buffers]:
        """Allocate arrays of `count` and `other` elements for all sizes; return their memory class and them.

        The memory class differs from `where` if a window has no room or is not needed.
        """
        transport, dtype = self._transport, self._request.dtype
        plain = self._backend.zeros if self._request.device == "cuda" else aligned_zeros
        make = transport.allocate if where == "window" else plain
        pool = Buffers(make(count, dtype), make(other, dtype))
        return ("device" if on_device(pool.array) else memory_of(transport, pool.array)), pool

    def __iter__(self) -> Iterator[CollectiveRow]:
        operations = {subject.operation.fill: subject.operation for subject in self._subjects}
        counts = self._counts
        for sweep in range(1, self._request.sweeps + 1):
            before = fastest = math.inf
            index = 0
            while index < len(counts):
                count = counts[index]
                before, fastest = fastest, math.inf
                cases = {
                    fill: self._case(operation, count) for fill, operation in operations.items()
                }
                for subject in self._subjects:
                    for where, pool in self._pools.items():
                        case = cases[subject.operation.fill]
                        try:
                            row = self._row(subject, where, pool, case)
                        except ConfigError:  # there is no room for its window
                            if subject.name in self._request.algorithms:
                                raise
                            continue
                        fastest = min(fastest, row.time_us * 1e-6)
                        yield row._replace(sweep=sweep)
                if self._request.stops and is_long_enough(
                    fastest, before, count / counts[index - 1]
                ):
                    done, longer = counts[: index + 1], counts[index + 1 :]
                    enough = int(BUCKET // self._request.dtype.itemsize)
                    if longer and count < enough:
                        bucket = next((each for each in longer if each >= enough), longer[-1])
                        done = [*done, bucket]
                    counts = done
                index += 1

    def _case(self, operation: BenchedCollective, count: int) -> SizeCase:
        part, right = operation.right(self._transport, count)
        own = operation.fill(self._transport.rank, count).astype(self._request.dtype)
        return SizeCase(self._backend.from_host(own), part, right.astype(self._request.dtype))

    def _row(self, subject: Subject, where: str, pool: Buffers, case: SizeCase) -> CollectiveRow:
        request, transport, backend = self._request, self._transport, self._backend
        operation, is_exact = subject.operation, subject.wire.name == "none"
        count, dtype, n = case.original.size, request.dtype, transport.size
        array, other = pool.array[:count], pool.other[: operation.other(n, count)]
        other[:] = case.original[: other.size]
        bound = operation.bind(
            transport,
            Buffers(array, other),
            ReductionOptions(subject.name, self._tuning, self._arithmetic),
        )
        chosen = bound.algorithm or subject.name
        timed = partial(_timed, backend, starting_line(transport), bound.run, array, case.original)
        cycles, _ = timed(1)
        spent = max(transport.gather_text(cycles.min()))
        error = math.nan if is_exact else error_norm(backend.to_host(array), case.right)
        is_once = request.stops and spent > LONGEST
        if request.warmup > 1 and not is_once:
            cycles, _ = timed(request.warmup - 1)
            spent = max(transport.gather_text(cycles.min()))
        fewest = 1 if is_once else 5
        _, times = timed(request.iterations or int(min(500, max(fewest, SECONDS / spent))))
        native_all_reduce(transport, times, "maximum")
        slowest = times / operation.ways * 1e6
        result = backend.to_host(other if operation.is_in_other else array[case.part])
        median, nbytes = float(np.median(slowest)), count * dtype.itemsize
        predicted = np.nan
        # MPI's own all-reduce is modelled, too; an all-to-all only of equal counts.
        is_modelled = request.operation != SKEWED and chosen in choices(request.operation)
        if is_modelled and is_exact and request.device == "cpu":
            size = count, dtype.itemsize, where
            predicted = 1e6 * predict(
                self._tuning, request.operation, chosen, transport.hosts, *size
            )
        return CollectiveRow(
            op=request.operation,
            algorithm=shown(subject.name),
            buffers=where,
            bytes=nbytes,
            count=count,
            dtype=dtype.name,
            ranks=n,
            time_us=median,
            min_us=float(slowest.min()),
            p99_us=float(np.percentile(slowest, 99)),
            algbw_GBs=nbytes / median / 1e3,
            busbw_GBs=nbytes / median / 1e3 * operation.bus(n),
            predicted_us=predicted,
            wrong=(
                wrong_elements(transport, result, case.right)
                if is_exact
                else wrong_replicas(transport, result)
            ),
            chosen=chosen,
            error=error,
            sweep=0,
        )


def _timed(
    backend: Backend,
    meet: Callable[[], None],
    collective: Callable[[], None],
    array: Any,
    original: Any,
    runs: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays of seconds of this rank's runs: with the preparation of a run, and without it.

    A preparation restores the input and waits until all ranks are ready.
    """
    ends, times, wait = np.empty(runs + 1), np.empty(runs), backend.synchronize
    ends[0] = time.perf_counter()
    for run in range(runs):
        array[:] = original
        wait()
        meet()
        start = time.perf_counter()
        collective()
        wait()
        ends[run + 1] = time.perf_counter()
        times[run] = ends[run + 1] - start
    return np.diff(ends), times


def is_long_enough(fastest: float, before: float, growth: float) -> bool:
    """Return whether longer arrays need no measurement (see LONG and LONGEST).

    fastest, before  seconds of the fastest algorithm at this size and at the previous size
    growth           this size divided by the previous size
    """
    return fastest > LONGEST or (fastest > LONG and fastest > 0.9 * growth * before)


def starting_line(transport: Transport) -> Callable[[], None]:
    """Return a function that returns at the same time on all ranks, which all call it. Collective.

    On one host it is a barrier: ranks leave a barrier a message's latency apart, which is little
    there. Between hosts this latency is as long as a short all-reduce, and the same ranks are late
    in every run. So on several hosts the ranks agree on a start time and wait for it. The offsets
    of their clocks are measured first; as clocks drift, they are accurate for some seconds only.
    """
    if len(set(transport.hosts)) == 1:
        return transport.barrier
    ahead = -Clocks(transport, time.perf_counter).measure()[1]
    due = np.zeros(1)

    def agree() -> None:
        due[0] = time.perf_counter() - ahead
        native_all_reduce(transport, due, "maximum")

    longest = np.zeros(1)
    for _ in range(ROUNDS):
        transport.barrier()
        start = time.perf_counter()
        agree()
        longest[0] = max(longest[0], time.perf_counter() - start)
    native_all_reduce(transport, longest, "maximum")

    def meet() -> None:
        agree()
        start = due[0] + ahead + MARGIN * longest[0]
        while (left := start - time.perf_counter()) > 0:
            time.sleep(max(0, left - 2e-4))  # sleep returns late, so the last 0.2 ms are spun

    return meet
