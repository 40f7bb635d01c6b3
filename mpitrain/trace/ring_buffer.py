"""The ring buffer of a trace: a head of JSON lines, then the newest records of one rank.

The file is mapped into memory. Writing a record needs no system call, and the contents survive when
the process is killed.

    byte             file
    0                +----------------------------------------------+
                     | MAGIC: mpitrain trace 3                      |
    17               | {"records": 16384}                           |  facts: later values
                     | ["", ""]                                     |   replace earlier ones
                     | {"rank": 2, "host": "a", ...}                |
                     | ["activation", [2, 4, 1]]                    |  name 1, of ranks 2 and 3
                     | {"clock": [time, offset]}                    |
                     | ...                                          |
                     | zeros                                        |
    HEAD - 24        | pace: steps, seconds, own seconds            |
    HEAD             +----------------------------------------------+
                     | record n with n % CAPACITY = 0               |
    HEAD + 52        | record n with n % CAPACITY = 1               |
                     | ...                                          |
                     | record n with n % CAPACITY = CAPACITY - 1    |
    HEAD + 52 x      +----------------------------------------------+
      CAPACITY

A record has 52 bytes, little-endian:

    byte   0      8    16      24    28    32   36     40    44    46    47     48
    field  start  end  nbytes  step  peer  tag  micro  unit  what  kind  phase  number
    type   f8     f8   i8      i4    i4    i4   i4     i4    u2    u1    u1     u4

A JSON object holds facts. The fact `clock` may occur several times, and all of its values count.
Its `offset` is added to times near `time` to get the clock of rank 0. A JSON list holds a name and
the ranks that it concerns. A record's field `what` is the number of such a list, from 0.
"""

import contextlib
import itertools
import json
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.files import Directory

KINDS = ("step", "compute", "wait", "reduction", "send", "receive", "pause", "device")
STEP, COMPUTE, WAIT, REDUCTION, SEND, RECEIVE, PAUSE, DEVICE = range(len(KINDS))
ROWS = "its rows"
"""The name of the compute span in which a rank gets the rows of a step."""
MESSAGES = "messages"
"""The name of a wait for any of the messages in progress."""
LIBRARY_CALLS = ("a barrier", "words of all ranks", "MPI's all-reduce")
"""The names of waits in collectives of the MPI library, whose messages have no records."""
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
"""Layout of a record, 52 bytes.

start, end  seconds of the rank's own clock; `end` is 0 until the span ends
nbytes      bytes of a message; in a wait the number of the awaited message's record, or 0
peer        rank in the whole job
micro, unit, tag, step  -1, as for `peer`, means none
"""

FORMAT = struct.Struct("<ddqiiiiiHBBI")
END = struct.Struct("<d")
PACE = struct.Struct("<qdd")
NUMBERS = 1 << 32
"""The number of a record is stored modulo NUMBERS: a run of some days writes more records."""
HEAD = 1 << 16
CAPACITY = 1 << 14
"""Records in a ring, 0.9 MB: some hundred steps of one rank, or some dozen with many messages."""
MAGIC = b"mpitrain trace 3\n"


class Pace(NamedTuple):
    """Totals over the steps that a rank has finished since its start.

    seconds  of these steps
    own      seconds of these steps in which the rank did not wait for messages
    """

    steps: int
    seconds: float
    own: float


class Ring:
    """Ring buffer of one rank's records, in memory until `move` gives it a file.

    Several threads may write.
    """

    def __init__(self, capacity: int = CAPACITY):
        self._map = mmap.mmap(-1, HEAD + capacity * FORMAT.size)
        self._map[: len(MAGIC)] = MAGIC
        self._capacity, self._used = capacity, len(MAGIC)
        self._next = itertools.count(1).__next__  # No other thread can interrupt this call.
        self.newest = 0
        # `move` sets the folder and the name of the file.
        self._folder: Directory | None = None
        self._name = ""
        self.note({"records": capacity})

    def note(self, line: Any) -> bool:
        """Append a line to the head; return False if the head is full."""
        text = json.dumps(line).encode() + b"\n"
        stop = self._used + len(text)
        if stop > HEAD - PACE.size:
            return False
        self._map[self._used : stop] = text
        self._used = stop
        return True

    def write(self, *fields: float) -> int:
        """Write a record and return its number; `fields` are all other fields in order."""
        number = self.newest = self._next()
        stored = number % NUMBERS
        FORMAT.pack_into(self._map, HEAD + number % self._capacity * FORMAT.size, *fields, stored)
        return number

    def end(self, number: int, end: float) -> None:
        """Write the end time of a record, unless a newer record has replaced it."""
        if self.newest - number < self._capacity:
            END.pack_into(self._map, HEAD + number % self._capacity * FORMAT.size + 8, end)

    def pace(self, pace: Pace) -> None:
        """Write the totals of the finished steps over the previous ones."""
        PACE.pack_into(self._map, HEAD - PACE.size, *pace)

    def flush(self) -> None:
        """Give all written memory to the file system, so that other hosts can read it."""
        self._map.flush()

    def move(self, folder: Directory, name: str) -> None:
        """Move the ring into a file, with all earlier records; no other thread may write meanwhile.

        The ring's previous file is removed. An existing file of this name is unlinked, even if
        another process still writes to it. Truncating that file would kill the process that maps
        it.

        folder  owned by the ring, which closes it when it moves on
        raises  OSError if the file cannot be created
        """
        size = len(self._map)
        descriptor = folder.create(name)
        try:
            # Reserve the space now: on a full disk a write to mapped memory kills the process.
            os.posix_fallocate(descriptor, 0, size)
            moved = mmap.mmap(descriptor, size)
        except OSError:
            folder.remove(name)
            raise
        finally:
            os.close(descriptor)
        moved[:] = self._map[:]
        self._map.close()
        self._map = moved
        self._remove_file()
        self._folder, self._name = folder, name

    def give_up(self, folder: Path) -> None:
        """Remove the ring's file if it is still in this folder; the ring stays usable."""
        if self._folder and self._folder.path == folder:
            self._remove_file()

    def _remove_file(self) -> None:
        if self._folder:
            with contextlib.suppress(OSError):
                self._folder.remove(self._name)
            self._folder.close()
            self._folder = None


def spelled(ranks: Sequence[int]) -> list[int] | str:
    """Return ranks as the head stores them.

    A regular group, which may be large, is [start, stop, step]; other groups are numbers with
    spaces.
    """
    if len(ranks) == 0:
        return ""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    regular = range(ranks[0], ranks[-1] + (1 if step > 0 else -1), step or 1)
    return (
        [regular.start, regular.stop, regular.step]
        if tuple(regular) == tuple(ranks)
        else " ".join(map(str, ranks))
    )
