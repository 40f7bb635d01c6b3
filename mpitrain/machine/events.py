"""Marks in the work of a device, as CUDA events: they time the device without blocking the host."""

from typing import Any, Protocol


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
        return self._event.done

    def since(self, earlier: "CudaMark") -> float:
        # CUDA returns milliseconds.
        return self._cuda.get_elapsed_time(earlier._event, self._event) / 1e3
