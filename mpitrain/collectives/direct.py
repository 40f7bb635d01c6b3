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

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import cycle
from typing import Any

import numpy as np

from mpitrain.collectives.engine.arithmetic import Arithmetic
from mpitrain.collectives.engine.executor import Agreed, Execution, Reduction, by_numpy
from mpitrain.collectives.plans.exchanges import barrier
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.errors import CommError, ConfigError
from mpitrain.machine.backend import on_device
from mpitrain.machine.process import SHARED_MEMORY
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


Phase = Sequence[tuple[np.ndarray, np.ndarray, bool]]
"""Copies and sums of one rank, (target, source, is_sum), in this order."""


class SharedMemory(Reduction):
    """Collective through shared memory: phases of local work, with a barrier between two of them.

    turns  the phases of a run; or those of two runs, which take turns. One list has three phases:
           the second barrier comes before any rank may overwrite an array that others read. Of two
           lists each has copies of its own, and one barrier a run is enough: a rank that enters it
           has read the copies of the run before
    """

    is_messages = False

    def __init__(
        self,
        transport: Transport,
        array: np.ndarray,
        op: str,
        tag: int,
        turns: Sequence[Sequence[Phase]],
    ):
        self._transport, self._combine, self._tag = transport, by_numpy(array, op), tag
        self._turns = cycle(turns)

    @cached_property
    def _meeting(self) -> Execution:
        """The barrier of a run in the background, made at the first: most activations have none."""
        transport = self._transport
        steps = barrier(transport.rank, transport.size)
        return Execution(transport, np.empty(0, np.uint8), "add", steps, self._tag)

    def _run(self) -> None:
        for _ in self._phases():
            self._transport.barrier()

    def _steps(self) -> Iterator[Request]:
        for _ in self._phases():
            self._meeting.start()
            yield self._meeting

    def _phases(self) -> Iterator[None]:
        """Do the phases of a run; yield between two of them, where all ranks must have done the first."""
        if self._transport.windows.closed:  # The run would write to memory that has been unmapped.
            raise CommError(
                f"rank {self._transport.rank}: a reduction through shared memory needs its window, but the transport "
                "it was split from is closed.",
                "Close it when all reductions have ended.",
            )
        for number, phase in enumerate(next(self._turns)):
            if number:
                yield
            for target, source, is_sum in phase:
                if is_sum:
                    self._combine(target, source)
                else:
                    target[:] = source


def offer(transport: Transport, array: np.ndarray) -> list[Any]:
    """Return the facts of this rank that a binding through shared memory needs.

    These are the location of the array in a window, or None, and the numbers of the windows that
    this rank could borrow for a copy.
    """
    windows, members = transport.windows, transport.members
    location = windows.locate(array, members[transport.rank])
    return [location, windows.idle(_borrowed(transport, array)[2], members)]


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
    slots, window = _slots(transport, array, agreed)
    if not slots:
        transport.windows.settle()
        return None
    turns = TURNS[operation](transport.rank, array.reshape(-1), slots)
    reduction = SharedMemory(transport, array, op, agreed.tag, turns)
    if window is not None:
        reduction.scratch_bytes = _borrowed(transport, array)[2]
        transport.windows.use(window, reduction)
    transport.windows.settle()
    return reduction


def _slots(
    transport: Transport, array: np.ndarray, agreed: Agreed
) -> tuple[list[Slot], int | None]:
    """Return the slots of a binding, and the number of the window with copies, or None without copies.

    A small array has two slots, any other has one. There is none, on every rank, if the host has no
    room for a window.
    """
    locations, idle = zip(*agreed.owns, strict=True)
    copies, apart, nbytes = _borrowed(transport, array)
    windows, members = transport.windows, transport.members
    if copies == 1 and locations[0] and all(one == locations[0] for one in locations):
        views = windows.views(Location(*locations[0]), members, array.size, array.dtype)
        if views is not None:
            return [views], None
    shared = set.intersection(*map(set, idle))
    location = (
        Location(min(shared), 0)
        if shared
        else windows.locate(transport.allocate(nbytes, np.uint8), members[transport.rank])
    )
    if location is None:
        return [], None
    slots = []
    for copy in range(copies):
        place = location._replace(offset=copy * apart)
        views = windows.views(place, members, array.size, array.dtype)
        if views is None:  # The ranks of one host name do not all share memory.
            return [], None
        slots.append(views)
    return slots, location.window


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


def _all_reduce(rank: int, flat: np.ndarray, slots: list[Slot]) -> list[list[Phase]]:
    """Return the `turns` of an all-reduce.

    Of a large array, rank r reduces chunk r, and writes the result to the arrays of all ranks. Of a
    small array, every rank reduces the whole by itself.
    """
    if len(slots) == 2:
        return [_alone(rank, flat, copies, slice(None)) for copies in slots]
    (copies,) = slots
    own, others = copies[rank], copies[rank + 1 :] + copies[:rank]
    worked = []
    for block in _blocks(flat, rank, len(copies)):
        worked += [(own[block], other[block], True) for other in others]
        worked += [(other[block], own[block], False) for other in others]
    if _is_copied(flat, own):
        return [[[(own, flat, False)], worked, [(flat, own, False)]]]
    return [[[], worked, []]]


def _reduce_scatter(rank: int, flat: np.ndarray, slots: list[Slot]) -> list[list[Phase]]:
    start, stop = chunk_bounds(flat.size, len(slots[0]))[rank]
    if len(slots) == 2:
        return [_alone(rank, flat, copies, slice(start, stop)) for copies in slots]
    (copies,) = slots
    worked = [
        (flat[block], copy[block], True)
        for block in _blocks(flat, rank, len(copies))
        for copy in copies[rank + 1 :] + copies[:rank]
    ]
    outside = [slice(0, start), slice(stop, None)] if _is_copied(flat, copies[rank]) else []
    return [[[(copies[rank][part], flat[part], False) for part in outside], worked, []]]


def _all_gather(rank: int, flat: np.ndarray, slots: list[Slot]) -> list[list[Phase]]:
    n = len(slots[0])
    chunks = [slice(*bounds) for bounds in chunk_bounds(flat.size, n)]
    # Each rank begins with the chunk of a different peer.
    peers = [(rank + step) % n for step in range(1, n)]
    own, turns = chunks[rank], list[list[Phase]]()
    for copies in slots:
        is_copied = _is_copied(flat, copies[rank])
        brought = [(copies[rank][own], flat[own], False)] if is_copied else []
        worked = [(flat[chunks[peer]], copies[peer][chunks[peer]], False) for peer in peers]
        turns.append([brought, worked])
    return turns if len(slots) == 2 else [[*turns[0], []]]


TURNS: dict[str, Callable[[int, np.ndarray, list[Slot]], list[list[Phase]]]] = {
    "allreduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
}


def _alone(rank: int, flat: np.ndarray, copies: Slot, part: slice) -> list[Phase]:
    """Return the phases in which a rank alone reduces a part of the copies of all ranks."""
    first, *others = copies
    worked = [(flat[part], first[part], False)]
    worked += [(flat[part], other[part], True) for other in others]
    return [[(copies[rank], flat, False)], worked]


def _blocks(flat: np.ndarray, rank: int, n: int) -> list[slice]:
    start, stop = chunk_bounds(flat.size, n)[rank]
    step = max(1, CACHED_BYTES // flat.itemsize)
    return [slice(low, min(low + step, stop)) for low in range(start, stop, step)]


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
