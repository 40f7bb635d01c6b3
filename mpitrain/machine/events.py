"""Marks in the work of a device: when it came past them, by its own clock, without anybody waiting for it."""

from typing import Any, Protocol


class Mark(Protocol):
    """A place in the work that was started on a device."""

    def test(self) -> bool:
        """True once the device has come past it, and past all marks before it; never blocks."""

    def since(self, earlier: Any) -> float:
        """Seconds from an earlier mark to this one; the device has come past both."""


class Passed:
    """A mark behind work that was done when it was made."""

    def __init__(self, now: float):
        self.now = now

    def test(self) -> bool:
        return True

    def since(self, earlier: "Passed") -> float:
        return self.now - earlier.now


class CudaMark:
    """An event on a stream."""

    def __init__(self, cuda: Any):
        """cuda: CuPy's; the event is recorded on the current stream."""
        self._cuda, self._event = cuda, cuda.get_current_stream().record(cuda.Event())

    def test(self) -> bool:
        return self._event.done

    def since(self, earlier: "CudaMark") -> float:
        return self._cuda.get_elapsed_time(earlier._event, self._event) / 1e3  # CUDA tells ms
