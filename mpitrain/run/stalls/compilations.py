"""Compilations as progress: at each look of the watchdog, the trace gets a new span for a running one."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpitrain.trace.recorder import COMPUTE, SILENT, Recorder

LONGEST = 600.0
"""Seconds after which a compilation no longer counts as progress."""


class Compilations:
    """The compilation that runs now, if there is one.

    recorder  of this rank; the watchdog replaces it
    """

    def __init__(self) -> None:
        self.recorder: Recorder = SILENT
        self._lock, self._name, self._span, self._until = threading.Lock(), -1, 0, 0.0

    @contextmanager
    def running(self, source: str) -> Iterator[None]:
        """Record the compilation of a source for the length of the context."""
        with self._lock:
            self._name = self.recorder.name(f"compiling {source}")
            self._span = self.recorder.begin(COMPUTE, self._name)
            self._until = time.monotonic() + LONGEST
        try:
            yield
        finally:
            with self._lock:
                self.recorder.end(self._span)
                self._name = -1

    def look(self) -> bool:
        """Return whether a compilation runs, and begin a new span of it."""
        with self._lock:
            if self._name < 0 or time.monotonic() > self._until:
                return False
            self.recorder.end(self._span)
            self._span = self.recorder.begin(COMPUTE, self._name)
            return True
