"""All-reduce through shared memory, without messages, for the ranks of one host.

Each rank reduces its chunk over the windows of all ranks, and writes the result to all of them.
A first barrier ensures that all arrays are ready, a second one that all chunks are reduced.

For a small array, each rank reduces the whole array itself. It reads copies in two slots that
take turns, so one barrier is enough.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.collectives.direct.cuda_ipc import bind_shared_gpu, unshared_gpu
from mpitrain.collectives.engine.agreement import Agreed
from mpitrain.collectives.engine.arithmetic import HOST, Arithmetic
from mpitrain.collectives.engine.executor import Execution, Reduction, started_twice
from mpitrain.collectives.plans.pairwise import barrier
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.collectives.plans.topology import Topology
from mpitrain.errors import CommError, ConfigError
from mpitrain.machine.backend import on_device
from mpitrain.machine.process import SHARED_MEMORY
from mpitrain.transport.base import Transport
from mpitrain.transport.windows import Location

CACHED_BYTES = 1 << 17
"""Bytes reduced at a time.

The block of every rank stays in cache from its reduction to its last copy.
"""

SMALL = 1 << 12
"""Largest size of a small array, in bytes over all ranks.

A barrier takes longer than reading all arrays of this size.
"""


class Shared(ABC):
    """Base class of collectives through shared memory; a Reduction.

    Subclasses define the work before, between and after the barriers.
    """

    state = learn = None
    algorithm = ""
    is_messages = False
    scratch_bytes = 0
    meetings = 0
    """Number of barriers of one run."""

    def __init__(self, transport: Transport, array: np.ndarray, op: str, tag: int):
        self._transport, self._combine = transport, HOST.combining(array, op)
        self._array = array.reshape(-1)
        self._meeting = Execution(
            transport, np.empty(0, np.uint8), "add", barrier(transport.rank, transport.size), tag
        )
        self._meetings_left = 0

    def run(self) -> None:
        if self._meetings_left or self._transport.windows.closed:
            raise self._refusal()
        self._bring()
        for left in reversed(range(self.meetings)):
            self._transport.barrier()
            self._met(left)

    def start(self) -> None:
        if self._meetings_left or self._transport.windows.closed:
            raise self._refusal()
        self._bring()
        self._meetings_left = self.meetings
        self._meeting.start()

    def poll(self) -> bool:
        while self._meetings_left:
            if not self._meeting.poll():
                return False
            self._go_on()
        return True

    def wait(self) -> None:
        while self._meetings_left:
            self._meeting.wait()
            self._go_on()

    @abstractmethod
    def _bring(self) -> None:
        """Copy this rank's array to memory that the other ranks read, unless it is there already."""

    @abstractmethod
    def _met(self, left: int) -> None:
        """Do the work after a barrier; `left` barriers follow in this run."""

    def _refusal(self) -> CommError:
        if self._meetings_left:
            return started_twice()
        # The run would write to memory that has been unmapped.
        return CommError(
            f"rank {self._transport.rank}: a reduction through shared memory needs its window, but the transport "
            "it was split from is closed.",
            "Close it when all reductions have ended.",
        )

    def _go_on(self) -> None:
        self._meetings_left -= 1
        self._met(self._meetings_left)
        if self._meetings_left:
            self._meeting.start()


class InPlace(Shared):
    """All-reduce in which rank r reduces chunk r and writes it to all: one read and write per byte.

    windows   region of every rank's window, by rank: the array itself, or a copy of it
    order     rank r sums its own elements first, then the elements of ranks r + 1, r + 2 ...: the
              same bits on all ranks and in every run
    """

    meetings = 2

    def __init__(
        self, transport: Transport, array: np.ndarray, op: str, tag: int, windows: list[np.ndarray]
    ):
        super().__init__(transport, array, op, tag)
        rank, n = transport.rank, transport.size
        self._own = windows[rank]
        self._in_window = self._array.ctypes.data == self._own.ctypes.data
        start, stop = chunk_bounds(array.size, n)[rank]
        step = max(1, CACHED_BYTES // array.itemsize)
        turned = windows[rank + 1 :] + windows[:rank]
        self._blocks = [
            (
                self._own[low : min(low + step, stop)],
                [window[low : min(low + step, stop)] for window in turned],
            )
            for low in range(start, stop, step)
        ]

    def _bring(self) -> None:
        if not self._in_window:
            self._own[:] = self._array

    def _met(self, left: int) -> None:
        """Reduce after the first barrier; copy the result from the window after the second one."""
        if left:
            for own, others in self._blocks:
                for other in others:
                    self._combine(own, other)
                for other in others:
                    other[:] = own
        elif not self._in_window:
            self._array[:] = self._own


class Small(Shared):
    """All-reduce in which every rank reduces the whole array: n - 1 times the reads, one barrier.

    slots   two sets of every rank's copy, by rank, for alternate runs. A rank in the barrier of one
            run has read the copies of the run before, so the next run may overwrite those
    order   ranks 0, 1, 2 ...: the same bits on all ranks and in every run
    """

    meetings = 1

    def __init__(
        self,
        transport: Transport,
        array: np.ndarray,
        op: str,
        tag: int,
        slots: list[list[np.ndarray]],
    ):
        super().__init__(transport, array, op, tag)
        self._own = [copies[transport.rank] for copies in slots]
        self._copies = [(copies[0], copies[1:]) for copies in slots]
        self._turn = 0

    def _bring(self) -> None:
        self._turn ^= 1
        self._own[self._turn][:] = self._array

    def _met(self, left: int) -> None:
        array, combine, (first, others) = self._array, self._combine, self._copies[self._turn]
        array[:] = first
        for other in others:
            combine(array, other)


def offer(transport: Transport, array: np.ndarray) -> list[Any]:
    """Return the facts that a binding through shared memory needs of each rank.

    The first is the location of the array in a window, or None. The second is a list of windows
    that this rank could borrow for a copy.
    """
    windows, members = transport.windows, transport.members
    location = windows.locate(array, members[transport.rank])
    return [location, windows.idle(_borrowed(transport, array)[2], members)]


def bind_shared(
    transport: Transport, array: np.ndarray, op: str, agreed: Agreed, arithmetic: Arithmetic
) -> Reduction | None:
    """Bind an all-reduce through shared memory; collective, over the ranks of one host.

    It uses the window that holds the array, or copies the array to a window and back. None on
    every rank if the host has no room for a window, or its GPUs cannot use each other's memory.

    agreed      with the `offer` of each rank
    arithmetic  for arrays in GPU memory; arrays in host memory use NumPy
    """
    if on_device(array):
        return bind_shared_gpu(transport, array, op, agreed.tag, arithmetic)
    return bind_in_window(
        transport,
        array,
        agreed,
        lambda slots: (
            Small(transport, array, op, agreed.tag, slots)
            if len(slots) == 2
            else InPlace(transport, array, op, agreed.tag, slots[0])
        ),
    )


def bind_in_window(
    transport: Transport,
    array: np.ndarray,
    agreed: Agreed,
    make: Callable[[list[list[np.ndarray]]], Shared],
) -> Reduction | None:
    """Return the reduction that `make` builds over shared memory; collective, within one host.

    None on every rank if the host has no room for a window.

    agreed  with the `offer` of each rank
    make    takes a list of slots, each the regions of all ranks by rank: two slots of copies for a
            small array, else one
    """
    locations, idle = zip(*agreed.owns, strict=True)
    copies, apart, nbytes = _borrowed(transport, array)
    windows, members = transport.windows, transport.members
    if copies == 1 and locations[0] and all(one == locations[0] for one in locations):
        views = windows.views(Location(*locations[0]), members, array.size, array.dtype)
        if views is not None:
            return make([views])
    shared = set.intersection(*map(set, idle))
    location = (
        Location(min(shared), 0)
        if shared
        else windows.locate(transport.allocate(nbytes, np.uint8), members[transport.rank])
    )
    if location is None:
        return None
    slots = []
    for copy in range(copies):
        slot = location._replace(offset=copy * apart)
        views = windows.views(slot, members, array.size, array.dtype)
        if views is None:  # The ranks of one host name do not all share memory.
            return None
        slots.append(views)
    reduction = make(slots)
    reduction.scratch_bytes = nbytes
    windows.use(location.window, reduction)
    return reduction


def _borrowed(transport: Transport, array: np.ndarray) -> tuple[int, int, int]:
    """Return how an array is copied to a window: copies, bytes between copies, bytes per rank."""
    copies = 2 if array.nbytes * transport.size <= SMALL else 1
    apart = -(-array.nbytes // 64) * 64
    # A power of two has few values, so that windows are reused often.
    return copies, apart, 1 << max(12, (copies * apart - 1).bit_length())


def unshared(transport: Transport, array: np.ndarray) -> ConfigError:
    """Return the error of a request for "shared" by name where its binding has failed."""
    if on_device(array):
        return unshared_gpu(transport)
    return ConfigError(
        f"algorithm shared needs {transport.size} x {array.nbytes:,} bytes in {SHARED_MEMORY}, but "
        f"{transport.hosts[0]} has no room for them.",
        "Make it larger (docker run --shm-size=4g), or use algorithm auto; of a benchmark, lower --max-bytes.",
    )


def refusal(situation: Topology) -> ConfigError | None:
    """Return an error unless all ranks are on one host."""
    return hosts_differ(situation, "hierarchical")


def hosts_differ(situation: Topology, instead: str) -> ConfigError | None:
    """Return an error that recommends algorithm `instead`, unless all ranks are on one host."""
    if len(set(situation.hosts)) == 1:
        return None
    return ConfigError(
        f"algorithm shared needs all ranks on one host, but they are on {len(set(situation.hosts))}.",
        f"Use algorithm {instead}.",
    )


def is_rival(situation: Topology) -> bool:
    """Return whether the arrays are in host memory; `choose` has a rule for GPUs, not a prediction."""
    return not situation.is_on_device
