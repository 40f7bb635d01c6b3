"""The recorder of a rank: notes spans of compute, waits and messages in a file, its trace.

A trace is a ring buffer: a head of JSON lines, then the newest records of one rank. The file is
mapped into memory. Writing a record needs no system call, and the contents survive when the process
is killed.

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

import itertools
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.files import created
from mpitrain.machine.backend import Mark

KINDS = ("step", "compute", "wait", "reduction", "send", "receive", "pause", "device")
STEP, COMPUTE, WAIT, REDUCTION, SEND, RECEIVE, PAUSE, DEVICE = range(len(KINDS))
CONNECTING = "finding the other ranks"
"""The name of the pause of a rank that waits for the others to connect."""
ROWS = "its rows"
"""The name of the compute span in which a rank gets the rows of a step."""
MESSAGES = "messages"
"""The name of a wait for any of the messages in progress."""
BARRIER, WORDS, NATIVE = LIBRARY_CALLS = ("a barrier", "words of all ranks", "MPI's all-reduce")
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

start, end   seconds of the rank's own clock; `end` is 0 until the span ends
nbytes       bytes of a message; in a wait the number of the awaited message's record, or 0
step         number of the optimizer step, from 0
peer         rank in the whole job
micro, unit  number of the micro-batch, and of the unit
number       of this record, modulo NUMBERS

-1 means that a record has no step, peer, tag, micro-batch or unit.
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
        # The file that `move` has made, and its status then.
        self._file: tuple[Path, os.stat_result] | None = None
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
        self._map.flush()

    def move(self, path: Path) -> None:
        """Move the ring into a file, with all earlier records; no other thread may write meanwhile.

        The ring's previous file is removed. OSError if the file cannot be created.
        """
        size = len(self._map)
        descriptor = created(path)
        try:
            # Reserve the space now: on a full disk a write to mapped memory kills the process.
            os.posix_fallocate(descriptor, 0, size)
            moved, facts = mmap.mmap(descriptor, size), os.fstat(descriptor)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        moved[:] = self._map[:]
        self._map.close()
        self._map = moved
        self._remove_file()
        self._file = path, facts

    def give_up(self, folder: Path) -> None:
        """Remove the ring's file if it is still in this folder; the ring stays usable."""
        if self._file and self._file[0].parent == folder:
            self._remove_file()

    def _remove_file(self) -> None:
        """Remove the ring's file, unless its name is another file's by now."""
        if self._file:
            path, facts = self._file
            with suppress(OSError):
                if os.path.samestat(path.lstat(), facts):
                    path.unlink()
            self._file = None


def spelled(ranks: Sequence[int]) -> list[int] | str:
    """Return ranks as the head stores them: [start, stop, step], or numbers with spaces."""
    if len(ranks) == 0:
        return ""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    regular = range(ranks[0], ranks[-1] + (1 if step > 0 else -1), step or 1)
    return (
        [regular.start, regular.stop, regular.step]
        if tuple(regular) == tuple(ranks)
        else " ".join(map(str, ranks))
    )


MOST_SPANS = 512
"""Largest number of spans of a device that are recorded together."""


class DeviceSpan(NamedTuple):
    """Device work between two marks (CUDA events).

    step    number of the optimizer step
    fields  of its record, after the times
    began   seconds of the host's clock at the launch
    """

    step: int
    fields: tuple[int, ...]
    began: float
    first: Mark
    last: Mark


class DeviceSpans:
    """Device work between pairs of marks, as spans on the host's clock, noted after they finish.

    The device passes a mark when the host makes it, or later. So each mark is a lower bound for the
    offset from device time to host time. At least once a step the host reads a result. At its next
    mark the device is idle, and the bound is exact. So the largest bound of a step is its offset.
    """

    def __init__(
        self, mark: Callable[[], Any], clock: Callable[[], float], write: Callable[..., int]
    ):
        """Take a function that makes a mark, the host's clock, and `Ring.write`."""
        self._mark, self._clock, self._write = mark, clock, write
        # Maps the number of the host's own record to (step, fields, began, first mark).
        self._open: dict[int, tuple[int, tuple[int, ...], float, Mark]] = {}
        self._launched: list[DeviceSpan] = []

    def begin(self, number: int, step: int, fields: tuple[int, ...]) -> None:
        """Begin a span: the host starts to launch work.

        number  number of the host's own record of the same work
        fields  fields of the device's record after its times
        """
        if self._launched and (step != self._launched[0].step or len(self._launched) >= MOST_SPANS):
            self.note()
        self._open[number] = step, fields, self._clock(), self._mark()

    def end(self, number: int) -> None:
        """End a span: the host has launched all of its work."""
        if number in self._open:
            self._launched.append(DeviceSpan(*self._open.pop(number), self._mark()))

    def interrupt(self) -> None:
        """End all open spans until `resume`: the host waits, so the device may run idle."""
        for span in self._open.values():
            self._launched.append(DeviceSpan(*span, self._mark()))

    def resume(self) -> None:
        """Reopen the spans that `interrupt` ended."""
        for number, (step, fields, _, _) in self._open.items():
            self._open[number] = step, fields, self._clock(), self._mark()

    def note(self) -> None:
        """Write the finished spans; a later call writes the spans that are still running."""
        while self._launched:
            step, count = self._launched[0].step, 0
            while (
                count < min(MOST_SPANS, len(self._launched)) and self._launched[count].step == step
            ):
                count += 1
            if not self._launched[count - 1].last.test():
                return
            zero = self._launched[0].first
            ahead = max(span.began - span.first.since(zero) for span in self._launched[:count])
            for span in self._launched[:count]:
                self._write(
                    ahead + span.first.since(zero), ahead + span.last.since(zero), *span.fields
                )
            del self._launched[:count]


class Recorder:
    """Recorder of spans in a ring buffer.

    A span stays open in the trace if its rank raises an error or is killed before the end.

    step    number of the current optimizer step, from 0; -1 before the first
    micro   micro-batch of the messages that start next; -1: none
    naming  name for the tags that are claimed next
    topic   number of the name for messages without a named tag
    owner   number of the thread whose waits are recorded
    waited  seconds of all waits that it has recorded so far
    """

    is_on = True

    def __init__(self, ring: Ring | None = None, clock: Callable[[], float] = time.perf_counter):
        """Make a recorder; of waits it records those of the calling thread, since others stop no rank."""
        self.clock, self.began = clock, time.perf_counter()
        self._ring, self._names = ring or Ring(), dict[tuple[str, tuple[int, ...]], int]()
        self.owner, self._waiting = threading.get_ident(), 0
        self._wait_at = self.waited = 0.0  # `_wait_at`: the time at which the newest wait began
        self._pace = Pace(0, 0.0, 0.0)
        self.step = self.micro = -1
        self.naming, self.topic = "", 0
        self._device: DeviceSpans | None = None
        self.name("")

    @property
    def newest(self) -> int:
        """The number of the newest record; it grows while the rank makes progress."""
        return self._ring.newest

    def flush(self) -> None:
        """Give the trace to the file system; some show mapped memory to other hosts late."""
        self._ring.flush()

    def facts(self, **facts: Any) -> None:
        """Record facts about this rank, serialisable as JSON; they replace earlier ones."""
        self._ring.note(facts)

    def name(self, what: str, ranks: Sequence[int] = ()) -> int:
        """Return the number of a name and the ranks of the whole job that it concerns.

        The first use records the name. It is 0, the empty name, if the head is full.
        """
        key = what, tuple(ranks)
        if key not in self._names:
            self._names[key] = len(self._names) if self._ring.note([what, spelled(ranks)]) else 0
        return self._names[key]

    @contextmanager
    def called(self, what: str) -> Iterator[None]:
        """Give a name to all tags that are claimed within the context."""
        before, self.naming = self.naming, what
        yield
        self.naming = before

    def about(self, name: int, micro: int) -> None:
        """Set the name and micro-batch of the next messages; a named tag has priority."""
        self.topic, self.micro = name, micro

    def begin(
        self,
        kind: int,
        name: int,
        phase: int = NO_PHASE,
        unit: int = -1,
        micro: int = -1,
        nbytes: int = 0,
        peer: int = -1,
        tag: int = -1,
    ) -> int:
        """Begin a span and return its number for `end`; KINDS and PHASES are above."""
        return self._ring.write(
            self.clock(), 0.0, nbytes, self.step, peer, tag, micro, unit, name, kind, phase
        )

    def end(self, span: int) -> None:
        self._ring.end(span, self.clock())
        if self._device:
            self._device.end(span)

    def compute(self, name: int, phase: int = NO_PHASE, unit: int = -1, micro: int = -1) -> int:
        """Begin a compute span, and return its record number for `end`.

        It covers host work and, with a device backend, the device work that the host launches.
        """
        number = self._ring.write(
            self.clock(), 0.0, 0, self.step, -1, -1, micro, unit, name, COMPUTE, phase
        )
        if self._device:
            self._device.begin(
                number, self.step, (0, self.step, -1, -1, micro, unit, name, DEVICE, phase)
            )
        return number

    def computes_on(self, mark: Callable[[], Any]) -> None:
        """Record device spans too, between marks in the device's work; none if `mark` returns None."""
        if mark() is not None:
            self._device = DeviceSpans(mark, self.clock, self._ring.write)

    def wait(self, name: int, peer: int = -1, message: int = 0) -> int:
        """Begin a wait for messages, which `go_on` ends; 0 if the wait is not recorded.

        A wait within a wait and a wait of another thread are not recorded.

        peer     the awaited rank; -1: all ranks that the name concerns
        message  number of the awaited message's span
        """
        if self._waiting or threading.get_ident() != self.owner:
            return 0
        self._wait_at = self.clock()
        awaited = message % NUMBERS
        self._waiting = self._ring.write(
            self._wait_at, 0.0, awaited, self.step, peer, -1, self.micro, -1, name, WAIT, NO_PHASE
        )
        if self._device:
            self._device.interrupt()
        return self._waiting

    def go_on(self, wait: int) -> None:
        if wait:
            self._waiting, now = 0, self.clock()
            self.waited += now - self._wait_at
            self._ring.end(wait, now)
            if self._device:
                self._device.end(wait)
                self._device.resume()

    @contextmanager
    def stepping(self, step: int) -> Iterator[None]:
        """Record one optimizer step, for the length of the context."""
        self.step, self._waiting, waited = step, 0, self.waited
        began = self.clock()
        span = self._ring.write(began, 0.0, 0, step, -1, -1, -1, -1, 0, STEP, NO_PHASE)
        yield
        now, pace = self.clock(), self._pace
        self._ring.end(span, now)
        own = now - began - (self.waited - waited)
        self._pace = Pace(pace.steps + 1, pace.seconds + now - began, pace.own + own)
        self._ring.pace(self._pace)

    @contextmanager
    def pausing(self, what: str) -> Iterator[None]:
        """Record a pause in training, such as an evaluation.

        Messages without a named tag get the pause's name.
        """
        span = self.begin(PAUSE, self.name(what))
        self.about(self.name(what), -1)
        yield
        self.about(0, -1)
        self.end(span)
        if self._device:
            self._device.note()

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Record work of the host within a pause: the watchdog counts it as progress."""
        span = self.begin(COMPUTE, self.name(what))
        yield
        self.end(span)

    def keep(self, path: Path) -> None:
        """Move the trace, with all earlier records, into this file; OSError if it cannot be created."""
        self._ring.move(path)

    def give_up(self, folder: Path) -> None:
        """Remove the trace file if it is still in this folder."""
        self._ring.give_up(folder)


class Silent(Recorder):
    """Recorder that records nothing."""

    is_on, newest = False, 0

    def __init__(self) -> None:
        self.step = self.micro = -1
        self.naming, self.topic, self.owner = "", 0, threading.get_ident()

    def begin(self, *fields: Any, **more: Any) -> Any:
        return 0

    compute = wait = end = go_on = name = about = facts = begin
    computes_on = flush = keep = begin

    @contextmanager
    def called(self, *fields: Any, **more: Any) -> Iterator[None]:
        yield

    stepping = pausing = working = called


SILENT = Silent()
