"""All-reduce without messages: the ranks of one host reduce each other's memory.

Each rank reduces its 1/n of the array over all ranks' windows and writes the result to all of them; a barrier before
tells that the arrays are ready, one after that they are done.
"""

import numpy as np

from mpitrain.collectives.agree import everywhere
from mpitrain.collectives.arithmetic import HOST
from mpitrain.collectives.execute import Execution, Reduction, started_twice
from mpitrain.collectives.pairwise import barrier
from mpitrain.collectives.plans import chunk_bounds
from mpitrain.errors import ConfigError
from mpitrain.transport.base import Transport
from mpitrain.transport.shared import Lease, Place

BLOCK = 1 << 17
"""Bytes reduced at a time: what every rank has of a block stays in cache from its reduction to its last copy."""


class Shared:
    """An all-reduce through shared memory: a Reduction.

    windows   every rank's part of the window, by rank: the array itself, or memory that it is copied to and from
    lease     of such memory
    order     chunk r is summed on rank r, its own part first, then those of ranks r + 1, r + 2 ...: the same bits on all
              ranks and in every run
    """

    state = None

    def __init__(self, transport: Transport, array: np.ndarray, op: str, windows: list[np.ndarray], tag: int,
                 lease: Lease | None):
        self._transport, self._combine, self._lease = transport, HOST.combining(array, op), lease
        rank, n = transport.rank, transport.size
        self._array, self._own = array.reshape(-1), windows[rank]
        self._in_window = self._array.ctypes.data == self._own.ctypes.data
        start, stop = chunk_bounds(array.size, n)[rank]
        step = max(1, BLOCK // array.itemsize)
        turned = windows[rank + 1:] + windows[:rank]
        self._blocks = [
            (self._own[low:min(low + step, stop)], [window[low:min(low + step, stop)] for window in turned])
            for low in range(start, stop, step)
        ]
        self._meeting = Execution(transport, np.empty(0, np.uint8), "add", barrier(rank, n), tag)
        self._meetings_left = 0

    def run(self) -> None:
        if self._meetings_left:
            raise started_twice()
        self._bring()
        self._transport.barrier()
        self._reduce()
        self._transport.barrier()
        self._fetch()

    def start(self) -> None:
        if self._meetings_left:
            raise started_twice()
        self._bring()
        self._meetings_left = 2
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

    def _go_on(self) -> None:
        """All ranks have met: before the reduction, or after it."""
        self._meetings_left -= 1
        if self._meetings_left:
            self._reduce()
            self._meeting.start()
        else:
            self._fetch()

    def _bring(self) -> None:
        if not self._in_window:
            self._own[:] = self._array

    def _fetch(self) -> None:
        if not self._in_window:
            self._array[:] = self._own

    def _reduce(self) -> None:
        for own, others in self._blocks:
            for other in others:
                self._combine(own, other)
            for other in others:
                other[:] = own


def bind_shared(transport: Transport, array: np.ndarray, op: str, tag: int) -> Reduction | None:
    """Bind an all-reduce through shared memory: through the window the array lies in, or through one it is copied to.

    Collective. None on every rank if the host has no room for a window; ConfigError if the ranks are on several hosts.
    """
    check_one_host(transport)
    windows, lease = _window_of(transport, array), None
    if windows is None:
        windows, lease = _borrow(transport, array)
    return None if windows is None else Shared(transport, array, op, windows, tag, lease)


def check_one_host(transport: Transport) -> None:
    """ConfigError on every rank if they are on several hosts."""
    if len(set(transport.hosts)) > 1:
        raise everywhere(ConfigError(
            f"algorithm shared needs all ranks on one host, but they are on {len(set(transport.hosts))}.",
            "Use algorithm hierarchical."))


def _window_of(transport: Transport, array: np.ndarray) -> list[np.ndarray] | None:
    """What lies where `array` does in every rank's window; None unless it lies at one place on all ranks. Collective."""
    place = transport.windows.locate(array, transport.members[transport.rank])
    views = None if place is None else transport.windows.views(place, transport.members, array.size, array.dtype)
    places = transport.gather_text(None if views is None else place)
    return views if all(p == places[0] for p in places) else None


def _borrow(transport: Transport, array: np.ndarray) -> tuple[list[np.ndarray], Lease] | tuple[None, None]:
    """A window to copy the array to and from: one that is idle on every rank, or a new one. Collective."""
    nbytes = 1 << max(12, (array.nbytes - 1).bit_length())  # few sizes, so that they are used again
    idle = set.intersection(*map(set, transport.gather_text(transport.windows.idle(nbytes))))
    place = Place(min(idle), 0) if idle else transport.windows.locate(
        transport.allocate(nbytes, np.uint8), transport.members[transport.rank])
    views = None if place is None else transport.windows.views(place, transport.members, array.size, array.dtype)
    if not all(transport.gather_text(views is not None)):
        return None, None
    return views, transport.windows.lease(place.window, nbytes)
