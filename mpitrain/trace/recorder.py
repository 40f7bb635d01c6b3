"""The recorder of a rank: begins and ends records of what the rank does, waits for, and sends."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpitrain.files import Directory, opened
from mpitrain.trace.device import DeviceSpans
from mpitrain.trace.ring_buffer import COMPUTE, DEVICE, NO_PHASE, PAUSE, STEP, WAIT, Ring, spelled


class Recorder:
    """Writes records to a ring. What begins and never ends, because its rank raises or is killed, stays open in the trace.

    step   number of the optimizer step under way, from 0; -1 before the first
    micro  the micro-batch that messages belong to; -1: to none
    topic  the name of messages whose tag has none
    """

    is_on = True

    def __init__(self, ring: Ring | None = None, clock: Callable[[], float] = time.perf_counter):
        """Made by the thread whose waits count: while another one waits, the rank goes on."""
        self.clock = clock
        self._ring, self._names = ring or Ring(), dict[tuple[str, tuple[int, ...]], int]()
        self._owner, self._waiting = threading.get_ident(), 0
        self.step = self.micro = -1
        self.naming, self.topic = "", 0
        self._device: DeviceSpans | None = None
        self.name("")

    def facts(self, **facts: Any) -> None:
        """Note what is true of this rank, as JSON carries it."""
        self._ring.note(facts)

    def name(self, what: str, ranks: Sequence[int] = ()) -> int:
        """The number of a name, noted at first use; 0, which says nothing, if there are too many.

        ranks  those that do this together, counted within the whole job
        """
        key = what, tuple(ranks)
        if key not in self._names:
            self._names[key] = len(self._names) if self._ring.note([what, spelled(ranks)]) else 0
        return self._names[key]

    @contextmanager
    def called(self, what: str) -> Iterator[None]:
        """Call messages so whose tags are claimed meanwhile."""
        before, self.naming = self.naming, what
        yield
        self.naming = before

    def about(self, name: int, micro: int) -> None:
        """The messages that are started next are called so, if their tags are not, and belong to this micro-batch."""
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
        """Begin a record, and return what ends it; kinds and phases are those of ring.py."""
        return self._ring.write(
            self.clock(), 0.0, nbytes, self.step, peer, tag, micro, unit, name, kind, phase
        )

    def end(self, span: int) -> None:
        """What was begun has ended."""
        self._ring.end(span, self.clock())
        if self._device:
            self._device.end(span)

    def compute(self, name: int, phase: int = NO_PHASE, unit: int = -1, micro: int = -1) -> int:
        """Begin to compute, or to start what a device computes."""
        number = self._ring.write(
            self.clock(), 0.0, 0, self.step, -1, -1, micro, unit, name, COMPUTE, phase
        )
        if self._device:
            self._device.begin(
                number, self.step, (0, self.step, -1, -1, micro, unit, name, DEVICE, phase)
            )
        return number

    def computes_on(self, mark: Callable[[], Any]) -> None:
        """Note what a device does of what this rank computes. mark: of its backend; says None where there is no such device."""
        if mark() is not None:
            self._device = DeviceSpans(mark, self.clock, self._ring.write)

    def wait(self, name: int, peer: int = -1, message: int = 0) -> int:
        """Stand still for messages, until `go_on`. A wait within a wait, and that of another thread, is none.

        peer     the rank that is waited for; -1: all that the name concerns
        message  what began the one that is waited for
        """
        if self._waiting or threading.get_ident() != self._owner:
            return 0
        self._waiting = self._ring.write(
            self.clock(), 0.0, message, self.step, peer, -1, self.micro, -1, name, WAIT, NO_PHASE
        )
        if self._device:
            self._device.interrupt()
        return self._waiting

    def go_on(self, wait: int) -> None:
        """The wait is over."""
        if wait:
            self._waiting = 0
            self.end(wait)
            if self._device:
                self._device.resume()

    @contextmanager
    def stepping(self, step: int) -> Iterator[None]:
        """Optimizer step `step` is under way."""
        self.step, self._waiting = step, 0
        span = self.begin(STEP, 0)
        yield
        self.end(span)

    @contextmanager
    def pausing(self, what: str) -> Iterator[None]:
        """Training rests for something else; messages whose tag has no name are called so, too."""
        span = self.begin(PAUSE, self.name(what))
        self.about(self.name(what), -1)
        yield
        self.about(0, -1)
        self.end(span)
        if self._device:
            self._device.note()

    def keep(self, path: Path, inner: int = 2) -> None:
        """Write to this file from now on, and what was written before; OSError if that cannot be. inner: see `files.reading`."""
        self.keep_in(opened(path.parent, inner - 1), path.name)

    def keep_in(self, folder: Directory, name: str) -> None:
        """As `keep`, in an open folder, which is closed when it is left or cannot be used."""
        try:
            self._ring.move(folder, name)
        except OSError:
            folder.close()
            raise

    def give_up(self, folder: Path) -> None:
        """Remove the file that is written to, if it still lies in this folder."""
        self._ring.give_up(folder)


class Silent(Recorder):
    """A recorder that notes nothing."""

    is_on = False

    def __init__(self) -> None:
        self.step = self.micro = -1
        self.naming, self.topic = "", 0

    def about(self, name: int, micro: int) -> None:
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

    def keep(self, path: Path, inner: int = 2) -> None:
        pass


SILENT = Silent()
