"""All-reduce without messages: the ranks of one host reduce each other's memory.

Each rank reduces its 1/n of the array over all ranks' windows and writes the result to all of them; a barrier before
tells that the arrays are ready, one after that they are done. Of a small array each rank reduces everything itself, from
copies that take turns, so that one barrier is enough.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from mpitrain.collectives.direct.cuda_ipc import bind_shared_gpu
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
"""Bytes reduced at a time: what every rank has of a block stays in cache from its reduction to its last copy."""

SMALL = 1 << 12
"""Bytes of all ranks' arrays together up to which they are small: a barrier takes longer than reading them all."""


class Shared(ABC):
    """A collective through shared memory: a Reduction. Subclasses say what is done before, between and after barriers."""

    state = learn = None
    algorithm = ""
    is_messages = False
    scratch_bytes = 0
    meetings = 0
    """Barriers of one run."""

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
        """Put this rank's array where the others read it."""

    @abstractmethod
    def _met(self, left: int) -> None:
        """All ranks have met, and will `left` times more."""

    def _refusal(self) -> CommError:
        """Why no run may begin: without this, what is written would not be memory any more."""
        if self._meetings_left:
            return started_twice()
        return CommError(
            f"rank {self._transport.rank}: a reduction through shared memory needs its window, but the transport "
            "it was split from is closed.",
            "Close it when all reductions have ended.",
        )

    def _go_on(self) -> None:
        """All ranks have met."""
        self._meetings_left -= 1
        self._met(self._meetings_left)
        if self._meetings_left:
            self._meeting.start()


class InPlace(Shared):
    """Chunk r is reduced on rank r and written to all: bytes are read and written once.

    windows   every rank's part of the window, by rank: the array itself, or memory that it is copied to and from
    order     rank r sums its own part first, then those of ranks r + 1, r + 2 ...: the same bits on all ranks and in every run
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
        """All arrays are ready: reduce. All chunks are: fetch."""
        if left:
            for own, others in self._blocks:
                for other in others:
                    self._combine(own, other)
                for other in others:
                    other[:] = own
        elif not self._in_window:
            self._array[:] = self._own


class Small(Shared):
    """Every rank reduces everything: (n - 1) times the reading for one barrier less.

    slots   two sets of every rank's copy, by rank. Runs use them in turn: a rank that enters the barrier of one run has
            read the copies of the run before, so the next run may write over those
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


def bind_shared(
    transport: Transport, array: np.ndarray, op: str, tag: int, arithmetic: Arithmetic
) -> Reduction | None:
    """Bind an all-reduce through shared memory: through the window the array lies in, or through one it is copied to.

    Collective, over the ranks of one host. None on every rank if the host has no room for a window.
    arithmetic  of GPU memory; host memory has its own
    """
    if on_device(array):
        return bind_shared_gpu(transport, array, op, tag, arithmetic)
    return bind_in_window(
        transport,
        array,
        lambda slots: (
            Small(transport, array, op, tag, slots)
            if len(slots) == 2
            else InPlace(transport, array, op, tag, slots[0])
        ),
    )


def bind_in_window(
    transport: Transport, array: np.ndarray, make: Callable[[list[list[np.ndarray]]], Shared]
) -> Reduction | None:
    """What is made of (slots): every rank's part of a window, by rank; two sets of copies if the array is small.

    Collective, over the ranks of one host. None on every rank if the host has no room for a window.
    """
    is_small = array.nbytes * transport.size <= SMALL
    windows = None if is_small else _window_of(transport, array)
    if windows is not None:
        return make([windows])
    borrowed = _borrow(transport, array, 2 if is_small else 1)
    if borrowed is None:
        return None
    window, slots, nbytes = borrowed
    reduction = make(slots)
    reduction.scratch_bytes = nbytes
    transport.windows.use(window, reduction)
    return reduction


def no_window(transport: Transport, array: np.ndarray) -> ConfigError:
    """The refusal where this algorithm was asked for by name, and its host has no room for a window."""
    return ConfigError(
        f"algorithm shared needs {transport.size} x {array.nbytes:,} bytes in {SHARED_MEMORY}, but "
        f"{transport.hosts[0]} has no room for them.",
        "Make it larger (docker run --shm-size=4g), or use algorithm auto; of a benchmark, lower --max-bytes.",
    )


def refusal(situation: Topology) -> ConfigError | None:
    """Memory is shared within one host."""
    return hosts_differ(situation, "hierarchical")


def hosts_differ(situation: Topology, instead: str) -> ConfigError | None:
    """The refusal where ranks are on several hosts, which names what to use instead."""
    if len(set(situation.hosts)) == 1:
        return None
    return ConfigError(
        f"algorithm shared needs all ranks on one host, but they are on {len(set(situation.hosts))}.",
        f"Use algorithm {instead}.",
    )


def is_rival(situation: Topology) -> bool:
    """Of host memory: whether GPUs can open each other's only binding tells, and no tuning knows it."""
    return not situation.is_on_device


def _window_of(transport: Transport, array: np.ndarray) -> list[np.ndarray] | None:
    """What lies where `array` does in every rank's window; None unless it lies at one location on all ranks. Collective."""
    location = transport.windows.locate(array, transport.members[transport.rank])
    views = (
        None
        if location is None
        else transport.windows.views(location, transport.members, array.size, array.dtype)
    )
    locations = transport.gather_text(None if views is None else location)
    return views if all(p == locations[0] for p in locations) else None


def _borrow(
    transport: Transport, array: np.ndarray, copies: int
) -> tuple[int, list[list[np.ndarray]], int] | None:
    """A window that is idle on every rank, or a new one; copies of the array in it, each by rank; its bytes. Collective."""
    apart = -(-array.nbytes // 64) * 64
    nbytes = 1 << max(
        12, (copies * apart - 1).bit_length()
    )  # few sizes, so that they are used again
    idle = set.intersection(
        *map(set, transport.gather_text(transport.windows.idle(nbytes, transport.members)))
    )
    location = (
        Location(min(idle), 0)
        if idle
        else transport.windows.locate(
            transport.allocate(nbytes, np.uint8), transport.members[transport.rank]
        )
    )
    views = [
        None
        if location is None
        else transport.windows.views(
            location._replace(offset=copy * apart), transport.members, array.size, array.dtype
        )
        for copy in range(copies)
    ]
    slots = [view for view in views if view is not None]
    is_whole = all(transport.gather_text(len(slots) == copies))
    return (location.window, slots, nbytes) if location is not None and is_whole else None
