"""The recorder of a rank: begins and ends spans of compute, waits and messages in its trace."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpitrain.files import Directory, opened
from mpitrain.trace.device import DeviceSpans
from mpitrain.trace.ring_buffer import (
    COMPUTE,
    DEVICE,
    NO_PHASE,
    NUMBERS,
    PAUSE,
    STEP,
    WAIT,
    Pace,
    Ring,
    spelled,
)


class Recorder:
    """Recorder of spans in a ring buffer.

    A span stays open in the trace if its rank raises an error or is killed before the end.

    step    number of the current optimizer step, from 0; -1 before the first
    micro   micro-batch of the messages that start next; -1: none
    naming  name for the tags that are claimed next
    topic   number of the name for messages without a named tag
    owner   number of the thread whose waits are recorded
    """

    is_on = True

    def __init__(self, ring: Ring | None = None, clock: Callable[[], float] = time.perf_counter):
        """Make a recorder for the waits of the calling thread; others do not stop the rank."""
        self.clock = clock
        self._ring, self._names = ring or Ring(), dict[tuple[str, tuple[int, ...]], int]()
        self.owner, self._waiting = threading.get_ident(), 0
        # `_waited` is the total of all recorded waits, in seconds; the newest began at `_wait_at`.
        self._wait_at = self._waited = 0.0
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
        """Show the trace to other hosts now; some file systems show mapped memory late."""
        self._ring.flush()

    def facts(self, **facts: Any) -> None:
        """Record facts about this rank, serialisable as JSON."""
        self._ring.note(facts)

    def name(self, what: str, ranks: Sequence[int] = ()) -> int:
        """Return the number of a name; 0, the empty name, if the head is full.

        The first use records the name.

        ranks  the ranks that the name concerns, counted in the whole job
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
        """Begin a span and return its number for `end`; ring_buffer.py defines kinds and phases."""
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
        """Record device spans too, if the backend has a device.

        mark   () -> a mark in the backend's work, None without a device
        """
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
            self._waited += now - self._wait_at
            self._ring.end(wait, now)
            if self._device:
                self._device.end(wait)
                self._device.resume()

    @contextmanager
    def stepping(self, step: int) -> Iterator[None]:
        """Record one optimizer step, for the length of the context."""
        self.step, self._waiting, waited = step, 0, self._waited
        began = self.clock()
        span = self._ring.write(began, 0.0, 0, step, -1, -1, -1, -1, 0, STEP, NO_PHASE)
        yield
        now, pace = self.clock(), self._pace
        self._ring.end(span, now)
        own = now - began - (self._waited - waited)
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

    def keep(self, path: Path, inner: int = 2) -> None:
        """Move the trace, with all earlier records, into this file.

        inner   number of trailing path components that must not be links; see `files.opened`
        raises  OSError if the file cannot be created
        """
        self.keep_in(opened(path.parent, inner - 1), path.name)

    def keep_in(self, folder: Directory, name: str) -> None:
        """Move the trace into a file of an open folder, as `keep`.

        folder  owned by the trace, which closes it when it moves on, or on failure
        """
        try:
            self._ring.move(folder, name)
        except OSError:
            folder.close()
            raise

    def give_up(self, folder: Path) -> None:
        """Remove the trace file if it is still in this folder."""
        self._ring.give_up(folder)


class Silent(Recorder):
    """Recorder that records nothing."""

    is_on = False

    def __init__(self) -> None:
        self.step = self.micro = -1
        self.naming, self.topic, self.owner = "", 0, threading.get_ident()

    def about(self, name: int, micro: int) -> None:
        pass

    newest = 0

    def flush(self) -> None:
        pass

    def facts(self, **facts: Any) -> None:
        pass

    def name(self, what: str, ranks: Sequence[int] = ()) -> int:
        return 0

    @contextmanager
    def called(self, what: str) -> Iterator[None]:
        yield

    def computes_on(self, mark: Callable[[], Any]) -> None:
        pass

    def begin(self, *fields: int, **more: int) -> int:
        return 0

    def end(self, span: int) -> None:
        pass

    compute = wait = begin

    def go_on(self, wait: int) -> None:
        pass

    @contextmanager
    def stepping(self, step: int) -> Iterator[None]:
        yield

    @contextmanager
    def pausing(self, what: str) -> Iterator[None]:
        yield

    working = pausing

    def keep(self, path: Path, inner: int = 2) -> None:
        pass


SILENT = Silent()
