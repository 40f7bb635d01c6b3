"""Memory that all ranks of one host can read and write: which array lies in it, and where its neighbours' parts are."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.errors import CommError, on_every_rank
from mpitrain.machine.backend import on_device
from mpitrain.machine.process import SHARED_MEMORY


class Location(NamedTuple):
    """Where an array lies: byte `offset` of this rank's block of window number `window`."""

    window: int
    offset: int


class Gathers(Protocol):
    """The part of a Transport that windows use when they are freed: its ranks in the whole job, and a gather of JSON."""

    @property
    def members(self) -> Sequence[int]: ...

    def gather_text(self, value: Any) -> list[Any]: ...


class Windows:
    """The shared windows of one rank; a split transport has its parent's.

    A window is in use while an array in it, or a reduction through it, lives. Use ends on each rank at its own time, so
    windows are freed only where their ranks meet. Closing a part frees the windows it made that no rank uses any more;
    closing the root frees all others. Whoever borrowed a window from a part may hence use it after the part is closed.

    next_number   free on this rank. Ranks that allocate together number a window by the largest of theirs: they may have
                  allocated differently before, each with others
    parts         transports of this rank that were split off, are open, and are known to somebody
    closed        the root is closed, and no window is left
    """

    def __init__(self) -> None:
        self._blocks: dict[int, dict[int, np.ndarray]] = {}
        self._free: dict[int, Callable[[], None]] = {}
        self._users: dict[int, list[weakref.ref]] = {}
        self.next_number = 0
        self.parts: weakref.WeakSet[Gathers] = weakref.WeakSet()
        self.closed = False

    def add(self, number: int, blocks: dict[int, np.ndarray], free: Callable[[], None]) -> None:
        """Remember a window: the bytes of each rank, by its rank in the whole job, and what gives them back."""
        self._blocks[number], self._free[number], self._users[number] = blocks, free, []
        self.next_number = number + 1

    def __len__(self) -> int:
        return len(self._blocks)

    def lend(self, window: int, member: int) -> np.ndarray:
        """The bytes of a member's block as an array: while that or a view of it lives, the window is in use."""
        array = np.asarray(
            memoryview(self._blocks[window][member])
        )  # no view of the block: its own views end here
        self.use(window, array)
        return array

    def use(self, window: int, user: Any) -> None:
        """The window is in use while `user` lives."""
        self._users[window] = [one for one in self._users[window] if one() is not None] + [
            weakref.ref(user)
        ]

    def _is_idle(self, window: int) -> bool:
        return all(user() is None for user in self._users[window])

    def locate(self, array: np.ndarray, me: int) -> Location | None:
        """The location of a contiguous array in this rank's own blocks; None if it lies elsewhere, or in a GPU's memory."""
        if on_device(array):
            return None
        address = array.ctypes.data
        for window, blocks in self._blocks.items():
            if me not in blocks:
                continue
            offset = address - blocks[me].ctypes.data
            if array.size and 0 <= offset <= blocks[me].nbytes - array.nbytes:
                return Location(window, offset)
        return None

    def views(
        self, location: Location, members: Sequence[int], count: int, dtype: Any
    ) -> list[np.ndarray] | None:
        """What lies at the same location in each member's block, by member; None if one of them is on another host."""
        blocks = self._blocks[location.window]
        if not all(member in blocks for member in members):
            return None
        stop = location.offset + count * np.dtype(dtype).itemsize
        return [blocks[member][location.offset : stop].view(dtype) for member in members]

    def idle(self, nbytes: int, members: Sequence[int]) -> list[int]:
        """Numbers of the windows of `nbytes` a rank that this rank does not use, and that these ranks have to themselves.

        A window that other ranks share is not among them: those ranks may still read what was reduced in it last.
        """
        return [
            window
            for window, blocks in self._blocks.items()
            if self._is_idle(window)
            and blocks.keys() == set(members)
            and all(block.nbytes == nbytes for block in blocks.values())
        ]

    def leave(self, part: Gathers, made: Sequence[int]) -> bool:
        """Free what a part that is being closed has made and no rank uses; False if some of it is left. Collective."""
        reported = part.gather_text([window for window in made if self._is_idle(window)])
        told = dict(zip(part.members, reported, strict=True))
        idle = [
            window
            for window in made
            if all(window in told[member] for member in self._blocks[window])
        ]
        self._release(idle)
        self.parts.discard(part)
        return len(idle) == len(made)

    def close(self, root: Gathers) -> None:
        """Free everything that is left. Collective; CommError on every rank if one of them has an open part."""
        parts = root.gather_text(len(self.parts))
        if any(parts):
            rank = next(rank for rank, count in enumerate(parts) if count)
            raise on_every_rank(
                CommError(
                    f"A transport is closed after what was split from it, but rank {rank} has {parts[rank]} open part(s).",
                    "Close the parts on all their ranks, then the transport they were split from.",
                )
            )
        self._release(
            sorted(self._blocks)
        )  # two ranks number the windows they share alike, and so free them in one order
        self.closed = True

    def _release(self, windows: Sequence[int]) -> None:
        for window in windows:
            self._free.pop(window)()
            del self._blocks[window], self._users[window]


def no_room(host: str, needed: int, left: int) -> str:
    """The one line said when a window does not fit and plain memory is used instead."""
    return (
        f"mpitrain: {SHARED_MEMORY} on {host} has {left / 2**20:.0f} MiB left, a shared window needs "
        f"{needed / 2**20:.0f} MiB free: using plain memory, which is slower. "
        "Make it larger (docker run --shm-size=4g)."
    )
