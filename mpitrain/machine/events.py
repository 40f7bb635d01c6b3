"""CUDA events: marks that time a device without blocking the host, and events of other processes."""

import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

NOT_READY = 600
"""cudaErrorNotReady: the device has not passed an event."""


class Mark(Protocol):
    """Point in the work of a device, with the device's own time."""

    def test(self) -> bool:
        """Return whether the device has passed this mark and all earlier ones; never blocks."""

    def since(self, earlier: Any) -> float:
        """Return the seconds from an earlier mark to this one; the device has passed both."""


class Passed:
    """Mark behind work that was done when the mark was made."""

    def __init__(self, now: float):
        self.now = now

    def test(self) -> bool:
        return True

    def since(self, earlier: "Passed") -> float:
        return self.now - earlier.now


class CudaMark:
    """CUDA event on a stream."""

    def __init__(self, cuda: Any):
        """Record the event on the current stream.

        cuda  the module cupy.cuda
        """
        self._cuda, self._event = cuda, cuda.get_current_stream().record(cuda.Event())

    def test(self) -> bool:
        return has_passed(self._cuda, self._event)

    def since(self, earlier: "CudaMark") -> float:
        # CUDA returns milliseconds.
        return self._cuda.get_elapsed_time(earlier._event, self._event) / 1e3


class SharedEvent:
    """CUDA event of this process that other processes of the host can wait for.

    raises  CUDARuntimeError if the driver refuses to share it
    """

    def __init__(self, cuda: Any):
        """Create the event.

        cuda  the module cupy.cuda
        """
        self._cuda = cuda
        self.event = cuda.Event(disable_timing=True, interprocess=True)
        self.handle: str = cuda.runtime.ipcGetEventHandle(self.event.ptr).hex()

    def record(self) -> None:
        """Record the event behind all work started so far on the current stream."""
        self._cuda.get_current_stream().record(self.event)


class OpenedEvent:
    """CUDA event of another process. It closes with the last reference to this object.

    raises  CUDARuntimeError if the driver refuses
    """

    def __init__(self, cuda: Any, handle: str):
        """Open the event.

        cuda  the module cupy.cuda
        """
        self.ptr = cuda.runtime.ipcOpenEventHandle(bytes.fromhex(handle))
        # At the exit of the process the driver closes the event.
        weakref.finalize(self, cuda.runtime.eventDestroy, self.ptr).atexit = False

    @property
    def event(self) -> "OpenedEvent":
        """The event for `wait_event` of a stream, which reads its `ptr`."""
        return self


def has_passed(cuda: Any, event: Any) -> bool:
    """Return whether the device has passed an event; never blocks.

    CuPy's `Event.done` stays False if the device has failed, so a loop that polls it has no end.

    cuda    the module cupy.cuda
    raises  CUDARuntimeError if the device has failed
    """
    status = cuda.runtime.eventQuery(event.ptr)
    if status in (0, NOT_READY):
        return status == 0
    silence_destructors(cuda.runtime.CUDARuntimeError)
    raise cuda.runtime.CUDARuntimeError(status)


def silence_destructors(failure: type[BaseException]) -> None:
    """Print nothing more of an error of this type in a destructor.

    After a failure of the device every event and allocation fails when it is freed. These messages
    would hide the first one.
    """
    if not isinstance(sys.unraisablehook, _Silence):
        sys.unraisablehook = _Silence(failure, sys.unraisablehook)


class _Silence:
    """A hook for errors of destructors that drops those of one type."""

    def __init__(self, failure: type[BaseException], report: Callable[[Any], object]):
        self._failure, self._report = failure, report

    def __call__(self, unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, self._failure):
            self._report(unraisable)
