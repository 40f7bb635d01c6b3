"""Memory that all ranks of one host can read and write: which array lies in it, and where its neighbours' parts are."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import on_device

MOUNT = "/dev/shm"
"""Where MPI libraries keep shared windows on Linux. Docker gives it 64 MiB unless told otherwise (--shm-size)."""


class Place(NamedTuple):
    """Where an array lies: byte `offset` of this rank's block of window number `window`."""

    window: int
    offset: int


class Windows:
    """The shared windows of one rank; a split transport has its parent's.

    next_number   free on this rank. Ranks that allocate together number a window by the largest of theirs: they may have
                  allocated differently before, each with others
    """

    def __init__(self) -> None:
        self._blocks: dict[int, dict[int, np.ndarray]] = {}
        self._keep: dict[int, Any] = {}
        self._idle: dict[int, int] = {}
        self.next_number = 0

    def add(self, number: int, blocks: dict[int, np.ndarray], owner: Any = None) -> None:
        """Remember a window: the bytes of each rank, by its rank in the whole job, and what keeps them alive."""
        self._blocks[number], self._keep[number] = blocks, owner
        self.next_number = number + 1

    def forget(self, window: int) -> None:
        """No array lies in this window any more, and nothing may be put there."""
        self._blocks[window], self._keep[window] = {}, None

    def __len__(self) -> int:
        return len(self._blocks)

    def locate(self, array: np.ndarray, me: int) -> Place | None:
        """The place of a contiguous array in this rank's own blocks; None if it lies elsewhere, or in a GPU's memory."""
        if on_device(array):
            return None
        address = array.ctypes.data
        for window, blocks in self._blocks.items():
            if me not in blocks:
                continue
            offset = address - blocks[me].ctypes.data
            if array.size and 0 <= offset <= blocks[me].nbytes - array.nbytes:
                return Place(window, offset)
        return None

    def views(self, place: Place, members: Sequence[int], count: int, dtype: Any) -> list[np.ndarray] | None:
        """What lies at the same place of each member's block, by member; None if one of them is on another host."""
        blocks = self._blocks[place.window]
        if not all(member in blocks for member in members):
            return None
        stop = place.offset + count * np.dtype(dtype).itemsize
        return [blocks[member][place.offset:stop].view(dtype) for member in members]

    def idle(self, nbytes: int, members: Sequence[int]) -> list[int]:
        """Numbers of the windows made for `nbytes` that were leased and returned, and that these ranks have to themselves.

        In one that others share, they may still read what was reduced last: only they know when they have done with it.
        """
        return [window for window, size in self._idle.items()
                if size == nbytes and self._blocks[window].keys() == set(members)]

    def lease(self, window: int, nbytes: int) -> "Lease":
        """Take a window that was made for `nbytes`; it is idle again when the lease dies."""
        self._idle.pop(window, None)
        return Lease(self._idle, window, nbytes)


class Lease:
    """Possession of a window by one bound reduction. It ends on each rank at its own time, so nothing is freed then."""

    def __init__(self, idle: dict[int, int], window: int, nbytes: int):
        self._idle, self.window, self._nbytes = idle, window, nbytes

    def __del__(self) -> None:
        self._idle[self.window] = self._nbytes


def room_left() -> int:
    """Bytes that can still be allocated in shared windows on this host."""
    facts = os.statvfs(MOUNT)
    return facts.f_bavail * facts.f_frsize


def no_room(host: str, needed: int, left: int) -> str:
    """The one line said when a window does not fit and plain memory is used instead."""
    return (f"mpitrain: {MOUNT} on {host} has {left / 2**20:.0f} MiB left, a shared window needs {needed / 2**20:.0f} MiB: "
            "using plain memory, which is slower. Make it larger (docker run --shm-size=4g).")
