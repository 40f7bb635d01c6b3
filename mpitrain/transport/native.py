"""The MPI library's own collectives: peers in measurements, and those of algorithm "native"."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import CommError
from mpitrain.machine.backend import on_device
from mpitrain.trace.recorder import NATIVE, REDUCTION
from mpitrain.transport.base import Recorded, Request, Several, Transport, check_message
from mpitrain.transport.device import DeviceTransport
from mpitrain.transport.mpi import MpiTransport, SendRequest
from mpitrain.transport.threads import ThreadTransport

NATIVE_OPERATIONS = ("broadcast", "reduce", "reduce-scatter", "all-gather", "all-to-all")
"""Collectives of the MPI library that `bind_native` knows; the first two have root 0."""

PART = 1 << 30
"""Largest number of elements that one call of the library reduces."""

MOST = (1 << 31) - 1
"""Largest number of elements in one call of any other collective of an MPI-3 library."""

OPS = {
    "add": "SUM",
    "multiply": "PROD",
    "maximum": "MAX",
    "minimum": "MIN",
    "bitwise_and": "BAND",
    "bitwise_or": "BOR",
    "bitwise_xor": "BXOR",
}
"""{op as in `Group.bind`: its name in MPI}."""


class NativeAllReduce(NamedTuple):
    """The library's own all-reduce of an array, in place.

    run    runs it. Collective
    start  begins it, as MPI_Iallreduce. Collective; non-blocking only for an array in host memory
    """

    run: Callable[[], None]
    start: Callable[[], Request]


def bind_native_all_reduce(transport: Transport, array: Any, op: str = "add") -> NativeAllReduce:
    """Return the MPI library's own all-reduce of an array.

    array   contiguous, with a dtype in `Transport.native_dtypes`
    op      as in `Group.bind`
    raises  by its runs, CommError if the library cannot reduce this dtype
    """
    host, recorder = _host(transport), transport.recorder
    blocking, starting = (_of_threads if isinstance(host, ThreadTransport) else _of_mpi)(host, op)

    staged: DeviceTransport | None = None
    if on_device(array) and isinstance(transport, DeviceTransport):
        staged = transport

    def run() -> None:
        wait = recorder.wait(transport.names[NATIVE]) if recorder.is_on else 0
        if staged is None:
            blocking(array)
        else:
            staged.on_host(array, blocking)
        recorder.go_on(wait)

    def start() -> Request:
        if staged is not None:
            # Open MPI cannot begin an all-reduce on GPU memory (open-mpi/ompi#12045). A request for
            # no message is complete at once.
            run()
            return Several([])
        return _recorded(transport, array, lambda: starting(array))

    return NativeAllReduce(run, start)


def native_all_reduce(transport: Transport, array: Any, op: str = "add") -> None:
    """Bind and run the library's own all-reduce of an array. Collective."""
    bind_native_all_reduce(transport, array, op).run()


def start_native_all_to_all(
    transport: Transport,
    outgoing: np.ndarray,
    incoming: np.ndarray,
    sent: Sequence[int],
    received: Sequence[int],
) -> Request:
    """Begin an all-to-all of unequal counts, as MPI_Ialltoallv. Collective.

    The call is no slower than MPI_Alltoallv; in Open MPI 5, longer arrays take half as long.

    outgoing, incoming  1-D, in host memory
    sent, received      the elements for each rank and from each, in the order of ranks; MOST in all
    """
    host, traffic = _host(transport), transport.traffic
    away = [count for rank, count in enumerate(sent) if rank != transport.rank]
    traffic.messages += sum(map(bool, away))
    traffic.nbytes += sum(away) * outgoing.itemsize

    def start() -> Request:
        if isinstance(host, ThreadTransport):
            return host.start_exchange(outgoing, sent, incoming)
        (source, _, unit), _ = host.message(outgoing)
        (target, _, _), _ = host.message(incoming)
        with host.job.lock, host.guard("MPI_Ialltoallv"):
            started = host.comm.Ialltoallv([source, sent, unit], [target, received, unit])
        # A rank with nothing to send or to receive may end before the others.
        return SendRequest(host, started, "native all-to-all", -1)

    return _recorded(transport, outgoing, start)


def _recorded(transport: Transport, array: Any, start: Callable[[], Request]) -> Request:
    """Start a collective of the library, with a record if there is a trace."""
    recorder = transport.recorder
    if not recorder.is_on:
        return start()
    name = transport.names[NATIVE]
    note = name, -1, recorder.begin(REDUCTION, name, nbytes=array.nbytes)
    return Recorded(start(), recorder, note)


def _host(transport: Transport) -> Any:
    return transport.host if isinstance(transport, DeviceTransport) else transport


Ways = tuple[Callable[[Any], None], Callable[[Any], Request]]
"""The blocking all-reduce of an array, and the one that is started."""


def _of_threads(host: ThreadTransport, op: str) -> Ways:
    def start(array: Any) -> Request:
        return host.start_all_reduce(array, op)

    return (lambda array: start(array).wait()), start


def _of_mpi(host: MpiTransport, op: str) -> Ways:
    in_place, kind, lock = host.MPI.IN_PLACE, getattr(host.MPI, OPS[op]), host.job.lock
    guard = host.guard("MPI_Allreduce")

    def run(array: Any) -> None:
        _check(host, array)
        with lock, guard:
            for part in _parts(host, array):
                host.comm.Allreduce(in_place, part, kind)

    def start(array: Any) -> Request:
        _check(host, array)
        with lock, host.guard("MPI_Iallreduce"):
            # A rank may end while another one computes and makes no progress.
            peer, what = -1, "native all-reduce"
            requests = [
                SendRequest(host, host.comm.Iallreduce(in_place, part, kind), what, peer)
                for part in _parts(host, array)
            ]
        return Several(requests)

    return run, start


def _parts(host: MpiTransport, array: Any) -> list[list]:
    """Return [buffer, count, datatype] for each MPI call, of at most PART elements."""
    flat = array.reshape(-1)
    parts = [flat[start : start + PART] for start in range(0, max(1, flat.size), PART)]
    return [[part, part.size, host.types[part.dtype]] for part in parts]


def _check(host: MpiTransport, array: Any) -> None:
    check_message(array, host.rank, (), host.size)
    if array.dtype not in host.types:
        raise CommError(
            f"rank {host.rank}: MPI's own all-reduce has no {array.dtype}.",
            "Use algorithm ring, which reduces any type.",
        )


def bind_native(
    transport: Transport,
    operation: str,
    array: np.ndarray,
    other: np.ndarray,
    counts: Sequence[int] = (),
) -> Callable[[], None]:
    """Return a function that runs one of the MPI library's other blocking collectives.
    Collective: binding, and every run.

    operation  a name in NATIVE_OPERATIONS; any, with counts
    array      in host memory; its length is a multiple of the number of ranks
    other      for an all-to-all: the array to send, as long as `array`. For a reduce-scatter: receives
               this rank's chunk of the sum. Other operations ignore it
    counts     of an all-to-all of unequal counts: the elements of `other` for each rank, whose run
               tells the counts first (MPI_Alltoall, MPI_Alltoallv); empty: parts are equal
    raises     CommError on every rank, if one call of the library cannot take so many elements
    """
    host = _host(transport)
    if counts and isinstance(host, ThreadTransport):
        return lambda: _of_counts(
            array, host.meet("native counts", (counts, other.copy())), host.rank
        )
    if isinstance(host, ThreadTransport):
        brings = other if operation == "all-to-all" else array
        receives = other if operation == "reduce-scatter" else array
        return lambda: np.copyto(
            receives,
            _collected(operation, host.meet(f"native {operation}", brings.copy()), host.rank),
        )
    assert isinstance(host, MpiTransport)
    if array.size > MOST:
        raise CommError(
            f"{host.own_name}: one call of MPI's own {operation} takes {MOST} elements, but the "
            f"array has {array.size}.",
            "Lower --max-bytes, or leave out algorithm native.",
        ).on_every_rank()
    lock = host.job.lock
    if counts:
        _, unit = host.message(array[:1])
        mine, theirs = np.array(counts, np.int32), np.empty(host.size, np.int32)

        def run_counts() -> None:
            with lock, host.guard(f"MPI's own {operation}"):
                host.comm.Alltoall(mine, theirs)
                host.comm.Alltoallv([other, mine, unit], [array, theirs, unit])

        return run_counts
    in_place, add, is_root = host.MPI.IN_PLACE, host.MPI.SUM, host.rank == 0
    _, unit = host.message(array[:1])
    count = array.size // host.size
    whole, parts, others = [array, array.size, unit], [array, count, unit], [other, count, unit]
    name, arguments = {
        "broadcast": ("Bcast", (whole, 0)),
        "reduce": ("Reduce", (in_place, whole, add, 0) if is_root else (whole, None, add, 0)),
        "reduce-scatter": ("Reduce_scatter_block", (parts, others, add)),
        "all-gather": ("Allgather", (in_place, parts)),
        "all-to-all": ("Alltoall", (others, parts)),
    }[operation]
    call = getattr(host.comm, name)
    guard = host.guard(f"MPI's own {operation}")
    if operation in ("broadcast", "reduce"):
        guard.awaits = ()  # Some ranks may leave these before others enter.

    def run() -> None:
        with lock, guard:
            call(*arguments)

    return run


def _of_counts(
    array: np.ndarray, brought: Sequence[tuple[Sequence[int], np.ndarray]], rank: int
) -> None:
    """Write to `array` the parts for this rank of (counts, array) of each rank."""
    start = 0
    for counts, sent in brought:
        first, count = sum(counts[:rank]), counts[rank]
        array[start : start + count] = sent[first : first + count]
        start += count


def _collected(operation: str, brought: Sequence[Any], rank: int) -> np.ndarray:
    """Return the array that an operation of `bind_native` leaves on `rank`.

    brought  the array of each rank
    """
    if operation == "broadcast":
        return brought[0]
    if operation == "reduce":
        return np.sum(brought, axis=0) if rank == 0 else brought[rank]
    chunks = [np.split(array, len(brought)) for array in brought]
    if operation == "reduce-scatter":
        return np.sum([parts[rank] for parts in chunks], axis=0)
    return np.concatenate(
        [
            parts[rank if operation == "all-to-all" else source]
            for source, parts in enumerate(chunks)
        ]
    )
