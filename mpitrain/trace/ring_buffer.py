"""The file of a trace: a head of JSON lines, and behind it the newest records of one rank in a ring.

The file is mapped into memory: a record is written without a call to the system, and what was written stays when the process
is killed. A line of the head is an object of facts, of which later ones hold, or a list of a name and of the ranks it concerns.
Records name lines of the second kind by their number, from 0. The fact `clock`, a time of the rank's clock and the seconds to
add to it to get that of rank 0, may come several times, and all of them hold.
"""

import contextlib
import itertools
import json
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.files import Directory

KINDS = ("step", "compute", "wait", "reduction", "send", "receive", "pause", "device")
STEP, COMPUTE, WAIT, REDUCTION, SEND, RECEIVE, PAUSE, DEVICE = range(len(KINDS))
PHASES = ("", "forward", "backward", "input half of backward", "weight half of backward", "update")
NO_PHASE, FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, UPDATE = range(len(PHASES))

RECORD = np.dtype(
    [
        ("start", "<f8"),
        ("end", "<f8"),
        ("nbytes", "<i8"),
        ("step", "<i4"),
        ("peer", "<i4"),
        ("tag", "<i4"),
        ("micro", "<i4"),
        ("unit", "<i4"),
        ("what", "<u2"),
        ("kind", "u1"),
        ("phase", "u1"),
        ("number", "<u4"),
    ]
)
"""Times in seconds of the rank's own clock, `end` 0 as long as it lasts; `peer` counts within the whole job; -1: none.

`nbytes` of a wait is the number of the message that is waited for, or 0.
"""

FORMAT = struct.Struct("<ddqiiiiiHBBI")
END = struct.Struct("<d")
HEAD = 1 << 16
CAPACITY = 1 << 14
"""Records: 0.9 MB, which hold some hundred steps of one rank, or some dozen of one that sends many messages."""
MAGIC = b"mpitrain trace 3\n"


class Ring:
    """One rank's records, in memory until they are given a file. Several threads may write."""

    def __init__(self, capacity: int = CAPACITY):
        self._map = mmap.mmap(-1, HEAD + capacity * FORMAT.size)
        self._map[: len(MAGIC)] = MAGIC
        self._capacity, self._used = capacity, len(MAGIC)
        self._next = itertools.count(1).__next__  # one call that no other thread interrupts
        self._newest = 0
        self._folder: Directory | None = None  # that the file lies in, and its name
        self._name = ""
        self.note({"records": capacity})

    def note(self, line: Any) -> bool:
        """Add a line to the head; False if the head is full."""
        text = json.dumps(line).encode() + b"\n"
        stop = self._used + len(text)
        if stop > HEAD:
            return False
        self._map[self._used : stop] = text
        self._used = stop
        return True

    def write(self, *fields: float) -> int:
        """Write a record, all fields but its number, which is returned."""
        number = self._newest = self._next()
        FORMAT.pack_into(self._map, HEAD + number % self._capacity * FORMAT.size, *fields, number)
        return number

    def end(self, number: int, end: float) -> None:
        """Write the end of a record, if the record is still there."""
        if self._newest - number < self._capacity:
            END.pack_into(self._map, HEAD + number % self._capacity * FORMAT.size + 8, end)

    def move(self, folder: Directory, name: str) -> None:
        """Go on in a file, which begins with what was written so far; OSError if there can be none. No other thread may write.

        The file that it lay in before is removed. So is one that lies there, whoever writes to it: it lives on without a name.
        To cut it off would end the process that has mapped it.
        folder  is closed by the ring, when it moves on
        """
        size = len(self._map)
        descriptor = folder.create(name)
        try:
            os.posix_fallocate(
                descriptor, 0, size
            )  # on a disk that is full a write to mapped memory ends the process
            moved = mmap.mmap(descriptor, size)
        except OSError:
            folder.remove(name)
            raise
        finally:
            os.close(descriptor)
        moved[:] = self._map[:]
        self._map.close()
        self._map = moved
        self._leave()
        self._folder, self._name = folder, name

    def give_up(self, folder: Path) -> None:
        """Remove its file, if it still lies in this folder; it may be written to as before."""
        if self._folder and self._folder.path == folder:
            self._leave()

    def _leave(self) -> None:
        """Remove the file, if the ring has one."""
        if self._folder:
            with contextlib.suppress(OSError):
                self._folder.remove(self._name)
            self._folder.close()
            self._folder = None


def spelled(ranks: Sequence[int]) -> list[int] | str:
    """Ranks as the head has them: [start, stop, step] of groups of a grid, which may be large, or the numbers as words."""
    if len(ranks) == 0:
        return ""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    found = range(ranks[0], ranks[-1] + (1 if step > 0 else -1), step or 1)
    return (
        [found.start, found.stop, found.step]
        if tuple(found) == tuple(ranks)
        else " ".join(map(str, ranks))
    )
