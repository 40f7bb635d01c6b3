"""Collectives without our own messages: through shared memory within a host, and MPI's all-reduce.

In an all-reduce through shared memory each rank reduces its chunk over the windows of all ranks, and
writes the result to all of them. A first barrier ensures that all arrays are ready, a second one that
all chunks are reduced. In a reduce-scatter and an all-gather each rank writes only to its own array,
and the second barrier ensures that all arrays have been read.

For a small array, each rank works alone on copies in two slots that take turns, so one barrier is
enough. Arrays in GPU memory go through cuda_ipc.py.

Order of sums, the same on all ranks and in every run. Small arrays: ranks 0, 1, 2 ... Others: rank r
sums its own elements of chunk r first, then the elements of ranks r + 1, r + 2 ... So a
reduce-scatter and then an all-gather give the bits of the all-reduce.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpitrain.collectives.engine.arithmetic import Arithmetic
from mpitrain.collectives.engine.executor import (
    Agreed,
    Combine,
    Phase,
    Reduction,
    SharedMemory,
    by_numpy,
)
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.errors import ConfigError
from mpitrain.machine.backend import on_device
from mpitrain.machine.process import SHARED_MEMORY
from mpitrain.regions import share
from mpitrain.transport.base import Request, Transport
from mpitrain.transport.device import DeviceTransport
from mpitrain.transport.native import bind_native_all_reduce
from mpitrain.transport.windows import Location

CACHED_BYTES = 1 << 17
"""Bytes reduced at a time.

The block of every rank stays in cache from its reduction to its last copy.
"""

SMALL = 1 << 12
"""Largest size of a small array, in bytes over all ranks.

A barrier takes longer than reading all arrays of this size.
"""

Slot = list[np.ndarray]
"""Region of every rank's window, by rank: the array itself, or a copy of it."""


def offer(transport: Transport, array: np.ndarray) -> list[Any]:
    """Return the facts of this rank that a binding through shared memory needs.

    These are the location of the array in a window, or None, and the windows that this rank could
    borrow for a copy. They are in use until the caller drops the list.
    """
    windows, members = transport.windows, transport.members
    location = windows.locate(array, members[transport.rank])
    return [location, windows.offer(_borrowed(transport, array)[2], members)]


def is_offer_of_all(transport: Transport, array: np.ndarray) -> bool:
    """Return whether all ranks `offer` the same for arrays at one place of their memory; collective.

    They do if they share memory, unless they could borrow a window: each sees at its own time that it is idle.
    """
    nbytes = _borrowed(transport, array)[2]
    return transport.shares_memory() and not transport.windows.shared_by(transport.members, nbytes)


def bind_shared(
    operation: str,
    transport: Transport,
    array: np.ndarray,
    op: str,
    agreed: Agreed,
    arithmetic: Arithmetic,
) -> Reduction | None:
    """Bind a collective through shared memory; collective, over the ranks of one host.

    It uses the window that contains the array, or copies the array to a window and back. It returns
    None, on every rank, if the host has no room for a window, or if its GPUs cannot use each other's
    memory.

    operation   "allreduce", "reduce-scatter" or "all-gather"
    agreed      with the `offer` of each rank
    arithmetic  for arrays in GPU memory; arrays in host memory use NumPy
    """
    if on_device(array):
        from mpitrain.collectives.cuda_ipc import bind_shared_gpu

        return bind_shared_gpu(operation, transport, array, op, agreed.tag, arithmetic)
    windows, members = transport.windows, transport.members
    copies, apart, nbytes = _borrowed(transport, array)
    locations, idle = zip(*agreed.owns, strict=True)
    is_copied = copies > 1 or not locations[0] or any(one != locations[0] for one in locations)
    place: Location | None
    if not is_copied:
        place = Location(*locations[0])
    elif shared := set.intersection(*map(set, idle)):
        place = Location(min(shared), 0)
    else:
        place = windows.locate(transport.allocate(nbytes, np.uint8), members[transport.rank])
    slots, reduction = list[Slot](), None
    if place is not None:  # A host without room for a window has no place.
        for copy in range(copies):
            at = place._replace(offset=place.offset + copy * apart)
            slots += [windows.views(at, members, array.size, array.dtype) or []]
        if all(slots):  # The ranks of one host name may share no memory.
            turns = TURNS[operation](transport.rank, array.reshape(-1), slots, by_numpy(array, op))
            reduction = SharedMemory(transport, agreed.tag, turns)
            if is_copied:
                reduction.scratch_bytes = nbytes
                windows.use(place.window, reduction)
    return reduction


def _borrowed(transport: Transport, array: np.ndarray) -> tuple[int, int, int]:
    """Return the number of copies of an array in a window, their distance in bytes, and bytes per rank."""
    copies = 2 if array.nbytes * transport.size <= SMALL else 1
    apart = -(-array.nbytes // 64) * 64
    # A power of two has few values, so that windows are reused often.
    return copies, apart, 1 << max(12, (copies * apart - 1).bit_length())


def give_up_shared(transport: Transport, array: np.ndarray, asked: str) -> None:
    """Note that these ranks use messages, as `bind_shared` has returned None.

    raises  ConfigError on every rank if "shared" was asked for by name
    """
    # Transports of GPUs have no windows for the few arrays in host memory.
    is_of_device = on_device(array) or isinstance(transport, DeviceTransport)
    has_memory = on_device(array) or not is_of_device
    is_refused = asked == "shared" and transport.size > 1 and has_memory
    if is_of_device:
        from mpitrain.collectives.cuda_ipc import note_unshared, unshared_gpu

        if is_refused:
            raise unshared_gpu(transport)
        note_unshared(transport)
    elif is_refused:
        raise ConfigError(
            f"algorithm shared needs {transport.size} x {array.nbytes:,} bytes in {SHARED_MEMORY}, but "
            f"{transport.hosts[0]} has no room for them.",
            "Make it larger (docker run --shm-size=4g), or use algorithm auto; of a benchmark, lower --max-bytes.",
        ).on_every_rank()


def _all_reduce(
    rank: int, flat: np.ndarray, slots: list[Slot], combine: Combine
) -> list[list[Phase]]:
    """Return the `turns` of an all-reduce.

    Of a large array, rank r reduces chunk r, and writes the result to the arrays of all ranks. Of a
    small array, every rank reduces the whole by itself.
    """
    if len(slots) == 2:
        return [_alone(rank, flat, copies, slice(None), combine) for copies in slots]
    (copies,) = slots
    own, others = copies[rank], copies[rank + 1 :] + copies[:rank]
    worked = list[Any]()
    for block in _blocks(flat, rank, len(copies)):
        worked += [(combine, own[block], other[block]) for other in others]
        worked += [(np.copyto, other[block], own[block]) for other in others]
    if _is_copied(flat, own):
        return [[[(np.copyto, own, flat)], worked, [(np.copyto, flat, own)]]]
    return [[[], worked, []]]


def _reduce_scatter(
    rank: int, flat: np.ndarray, slots: list[Slot], combine: Combine
) -> list[list[Phase]]:
    chunk = share(flat.size, rank, len(slots[0]))
    if len(slots) == 2:
        part = slice(chunk.start, chunk.stop)
        return [_alone(rank, flat, copies, part, combine) for copies in slots]
    (copies,) = slots
    worked = [
        (combine, flat[block], copy[block])
        for block in _blocks(flat, rank, len(copies))
        for copy in copies[rank + 1 :] + copies[:rank]
    ]
    outside = [slice(0, chunk.start), slice(chunk.stop, None)]
    if not _is_copied(flat, copies[rank]):
        outside = []
    return [[[(np.copyto, copies[rank][part], flat[part]) for part in outside], worked, []]]


def _all_gather(
    rank: int, flat: np.ndarray, slots: list[Slot], combine: Combine
) -> list[list[Phase]]:
    n = len(slots[0])
    chunks = [slice(*bounds) for bounds in chunk_bounds(flat.size, n)]
    # Each rank begins with the chunk of a different peer.
    peers = [(rank + step) % n for step in range(1, n)]
    own, turns = chunks[rank], list[list[Phase]]()
    for copies in slots:
        is_copied = _is_copied(flat, copies[rank])
        brought = [(np.copyto, copies[rank][own], flat[own])] if is_copied else []
        worked = [(np.copyto, flat[chunks[peer]], copies[peer][chunks[peer]]) for peer in peers]
        turns.append([brought, worked])
    return turns if len(slots) == 2 else [[*turns[0], []]]


TURNS: dict[str, Callable[[int, np.ndarray, list[Slot], Combine], list[list[Phase]]]] = {
    "allreduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
}


def _alone(rank: int, flat: np.ndarray, copies: Slot, part: slice, combine: Combine) -> list[Phase]:
    """Return the phases in which a rank alone reduces a part of the copies of all ranks."""
    first, *others = copies
    worked: list[Any] = [(np.copyto, flat[part], first[part])]
    worked += [(combine, flat[part], other[part]) for other in others]
    return [[(np.copyto, copies[rank], flat)], worked]


def _blocks(flat: np.ndarray, rank: int, n: int) -> list[slice]:
    """Return the parts of this rank's chunk that are reduced one after the other."""
    chunk, step = share(flat.size, rank, n), max(1, CACHED_BYTES // flat.itemsize)
    return [slice(low, min(low + step, chunk.stop)) for low in chunk[::step]]


def _is_copied(flat: np.ndarray, own: np.ndarray) -> bool:
    """Return whether this rank's region of the window is a copy, not the array itself."""
    return flat.ctypes.data != own.ctypes.data


class Native(Reduction):
    """MPI's all-reduce bound to an array. A baseline, and a fallback."""

    is_messages = False

    def __init__(
        self,
        transport: Transport,
        array: np.ndarray,
        op: str,
        agreed: Agreed,
        arithmetic: Arithmetic,
    ):
        self._native = bind_native_all_reduce(transport, array, op)

    def _run(self) -> None:
        self._native.run()

    def _steps(self) -> Iterator[Request]:
        yield self._native.start()
