"""A sweep over sizes and algorithms, with the buffers that its rows share."""

import math
from collections.abc import Iterator, Sequence

from mpitrain.collectives.engine.arithmetic import Wire, arithmetic_of
from mpitrain.collectives.group import memory_of
from mpitrain.collectives.selection.algorithm import Topology
from mpitrain.collectives.selection.cost_model import Tuning
from mpitrain.errors import ConfigError, on_every_rank
from mpitrain.machine.backend import on_device
from mpitrain.ops.device import device_for
from mpitrain.tools.bench.collectives.buffers import LEASED
from mpitrain.tools.bench.collectives.native import names, operation_of, refusals
from mpitrain.tools.bench.collectives.operations import Buffers, lossy
from mpitrain.tools.bench.collectives.request import SweepRequest
from mpitrain.tools.bench.collectives.row import (
    LONGEST,
    Bench,
    CollectiveRow,
    Subject,
    case_of,
    measure_row,
)
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport, aligned_zeros
from mpitrain.transport.device import over_device

LONG = 0.05
"""Seconds per run of the fastest algorithm above which a sweep leaves out sizes.

Above LONG it does so if time has grown in proportion to the array; above LONGEST always.
"""
BUCKET = 25e6
"""Bytes of the largest bucket that a run without replication.bucket_mb is expected to have."""


class Sweep:
    """An iterator over rows as they are measured.

    total  upper bound of the number of rows: `stops` in the request may end the sweep early
    """

    def __init__(self, total: int, rows: Iterator[CollectiveRow]):
        self.total, self._rows = total, rows

    def __iter__(self) -> Iterator[CollectiveRow]:
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
) -> Iterator[CollectiveRow]:
    operations = {subject.operation.fill: subject.operation for subject in subjects}
    for sweep_number in range(1, bench.request.sweeps + 1):
        before = fastest = math.inf
        index = 0
        while index < len(counts):
            count = counts[index]
            before, fastest = fastest, math.inf
            cases = {
                fill: case_of(bench, operation, count) for fill, operation in operations.items()
            }
            for subject in subjects:
                for where, pool in pools.items():
                    try:
                        row = measure_row(
                            bench, subject, where, pool, cases[subject.operation.fill], sweep_number
                        )
                    except ConfigError:  # there is no room for its window
                        if bench.request.algorithms:
                            raise
                        continue
                    fastest = min(fastest, row.time_us * 1e-6)
                    yield row
            if bench.request.stops and is_long_enough(fastest, before, count / counts[index - 1]):
                done, longer = counts[: index + 1], counts[index + 1 :]
                enough = int(BUCKET // bench.request.dtype.itemsize)
                if longer and count < enough:
                    done = [*done, next((each for each in longer if each >= enough), longer[-1])]
                counts = done
            index += 1


def is_long_enough(fastest: float, before: float, growth: float) -> bool:
    """Return whether longer arrays need no measurement: see LONG and LONGEST.

    fastest, before  seconds of the fastest algorithm at this size and at the previous size
    growth           this size over the previous size
    """
    return fastest > LONGEST or (fastest > LONG and fastest > 0.9 * growth * before)
