"""Windows of memory that the ranks of one host share (MPI_Win_allocate_shared).

A window is one block of bytes per rank. All its ranks can read and write every block. This module
finds the window of an array, and the other ranks' blocks in it.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import CommError
from mpitrain.machine.backend import on_device
from mpitrain.machine.process import SHARED_MEMORY

MOST_RANKS = 1 << 24
"""More than the ranks of any job: numbers of windows end with the rank that gave them."""


class Location(NamedTuple):
    """The position of an array: byte `offset` of this rank's block in window number `window`."""

    window: int
    offset: int


class Offer(list[int]):
    """Numbers of windows that one binding may borrow; they are in use while it exists."""


class Windows:
    """The shared windows of one rank; a split transport uses its parent's object.

    A window is in use while an array in it, or a reduction through it, exists. Use ends on each
    rank at its own time. Windows are therefore freed only in collective calls. Closing a split
    transport frees the windows that it made and that no rank uses any more. Closing the root frees
    all others. A window borrowed from a split transport thus stays usable after that transport is
    closed.

    Groups may allocate and bind in several threads at the same time.

    parts         split-off transports of this rank that are open and still referenced
    closed        the root is closed, and no window is left
    """

    def __init__(self) -> None:
        self._blocks: dict[int, dict[int, np.ndarray]] = {}
        self._free: dict[int, Callable[[], None]] = {}
        self._users: dict[int, list[weakref.ref]] = {}
        self._numbers, self._binding = 0, threading.Lock()
        self.parts: weakref.WeakSet[Any] = weakref.WeakSet()
        self.closed = False

    def add(
        self, number: int, blocks: dict[int, np.ndarray], free: Callable[[], None], me: int
    ) -> np.ndarray:
        """Register a window, and return the block of rank `me` (of the whole job) as an array of bytes.

        The window is in use while the array or a view of it exists.

        number  the window's number, equal on all ranks that share it
        blocks  each rank's memory in the window as a uint8 array; keys are ranks in the whole job
        free    function without arguments that frees the window
        """
        with self._binding:
            self._free[number], self._users[number] = free, []
            self._blocks[number] = blocks
        # A new array over the same memory is no view of the block. Views of it therefore refer to
        # it alone.
        array = np.asarray(memoryview(blocks[me]))
        self.use(number, array)
        return array

    def new_number(self, me: int) -> int:
        """Return a number that no other window of the job has or gets; me: this rank in the whole job.

        The first of the ranks that allocate together calls it.
        """
        with self._binding:
            self._numbers += 1
            return self._numbers * MOST_RANKS + me

    def __len__(self) -> int:
        return len(self._blocks)

    def use(self, window: int, user: Any) -> None:
        """Mark the window as in use while `user` exists."""
        with self._binding:
            living = [one for one in self._users[window] if one() is not None]
            self._users[window] = [*living, weakref.ref(user)]

    def _is_idle(self, window: int) -> bool:
        return all(user() is None for user in self._users[window])

    def locate(self, array: np.ndarray, me: int) -> Location | None:
        """Return the location of a contiguous host array in the blocks of rank `me`, or None."""
        if on_device(array):
            return None
        address = array.ctypes.data
        for window, blocks in [*self._blocks.items()]:
            if me not in blocks:
                continue
            offset = address - blocks[me].ctypes.data
            if array.size and 0 <= offset <= blocks[me].nbytes - array.nbytes:
                return Location(window, offset)
        return None

    def views(
        self, location: Location, members: Sequence[int], count: int, dtype: Any
    ) -> list[np.ndarray] | None:
        """Return the array at the same location of each member's block, by member.

        None if a member is on another host.
        """
        blocks = self._blocks[location.window]
        if not all(member in blocks for member in members):
            return None
        stop = location.offset + count * np.dtype(dtype).itemsize
        return [blocks[member][location.offset : stop].view(dtype) for member in members]

    def offer(self, nbytes: int, members: Sequence[int]) -> Offer:
        """Return the windows of `shared_by` that this rank does not use."""
        with self._binding:
            idle = Offer(filter(self._is_idle, self.shared_by(members, nbytes)))
            for window in idle:
                self._users[window] = [weakref.ref(idle)]
        return idle

    def shared_by(self, members: Sequence[int], nbytes: int) -> list[int]:
        """Return the windows of `nbytes` per rank that only these ranks share.

        A window shared with other ranks is left out: those ranks may still read the result of its
        last reduction.
        """
        shares = dict.fromkeys(members, nbytes)
        return [
            window
            for window, blocks in self._blocks.items()
            if shares == {member: block.nbytes for member, block in blocks.items()}
        ]

    def leave(self, part: Any, made: Sequence[int]) -> bool:
        """Free the windows that the closing `part` has made and no rank uses; False if some remain.
        Collective.
        """
        reported = part.gather_text([window for window in made if self._is_idle(window)])
        by_member = dict(zip(part.members, reported, strict=True))
        idle = [
            window
            for window in made
            if all(window in by_member[member] for member in self._blocks[window])
        ]
        self._release(idle)
        self.parts.discard(part)
        return len(idle) == len(made)

    def close(self, root: Any) -> None:
        """Free all remaining windows. Collective.

        raises  CommError on every rank if any rank has an open split transport
        """
        parts = root.gather_text(len(self.parts))
        if any(parts):
            rank = next(rank for rank, count in enumerate(parts) if count)
            raise CommError(
                f"A transport is closed after what was split from it, but rank {rank} has {parts[rank]} open part(s).",
                "Close the parts on all their ranks, then the transport they were split from.",
            ).on_every_rank()
        # Two ranks give a shared window the same number, so they free shared windows in the same
        # order.
        self._release(sorted(self._blocks))
        self.closed = True

    def _release(self, windows: Sequence[int]) -> None:
        for window in windows:
            with self._binding:
                del self._blocks[window], self._users[window]
            self._free.pop(window)()


class Tenants:
    """A registry of objects, built on a transport, that own communicators or windows.

    The transport closes them before itself. Each rank's garbage collector frees such an object at
    its own time. The ranks therefore agree on the objects that still exist.
    """

    def __init__(self) -> None:
        self._closing: list[weakref.WeakMethod] = []

    def add(self, close: Callable[[], None]) -> None:
        """Register the bound method that closes an object, by a weak reference. Collective.

        The method must tolerate a second call.
        """
        self._closing.append(weakref.WeakMethod(close))

    def close(self, transport: Any) -> None:
        """Close the objects that still exist on every rank, the newest first. Collective.

        An object that exists on only some ranks stays open, because closing is collective.
        """
        living = [method() for method in self._closing]
        self._closing.clear()
        if not living:
            return
        closable = transport.gather_text([close is not None for close in living])
        while living:
            close = living.pop()
            if close and all(lives[len(living)] for lives in closable):
                close()


def no_room(host: str, needed: int, left: int) -> str:
    """Return the line that is printed when a window does not fit."""
    return (
        f"mpitrain: {SHARED_MEMORY} on {host} has {left / 2**20:.0f} MiB left, a shared window needs "
        f"{needed / 2**20:.0f} MiB free: using plain memory, which is slower. "
        "Make it larger (docker run --shm-size=4g)."
    )
