"""Asynchronous copies from host memory to a GPU, through page-locked (pinned) buffers.

A copy from pageable memory would block the host until the GPU has done all earlier work.
"""

from collections import defaultdict, deque
from types import ModuleType
from typing import Any

import numpy as np

from mpitrain.machine.backend import address
from mpitrain.machine.events import has_passed

LARGEST = 64 << 20
"""Bytes of the largest array that gets a pinned buffer; checkpoints and the like may be larger."""
SMALLEST = 512


class PinnedCopies:
    """Copies onto arrays of the device in the order of the current stream; the host does not wait.

    A buffer is reused as soon as its copy is complete. The number of buffers is bounded because
    the host reads the device in every step.

    cupy  the module
    """

    def __init__(self, cupy: ModuleType):
        self._cuda = cupy.cuda
        # The buffers of each size: (buffer, event after its last copy). The oldest comes first.
        self._buffers: dict[int, deque[tuple[np.ndarray, Any]]] = defaultdict(deque)

    def put(self, target: Any, array: np.ndarray) -> None:
        """Start to copy a contiguous host array onto `target`; `array` may change at once.

        target  of the same shape and dtype, contiguous
        """
        if not array.nbytes:
            return
        size = max(SMALLEST, 1 << (array.nbytes - 1).bit_length())
        buffer = self._free(size)
        np.copyto(buffer[: array.nbytes], array.reshape(-1).view(np.uint8))
        stream, runtime = self._cuda.get_current_stream(), self._cuda.runtime
        runtime.memcpyAsync(
            address(target), address(buffer), array.nbytes, runtime.memcpyDefault, stream.ptr
        )
        event = stream.record(self._cuda.Event(disable_timing=True))
        self._buffers[size].append((buffer, event))

    def _free(self, size: int) -> np.ndarray:
        """Return a buffer that no copy reads."""
        buffers = self._buffers[size]
        if buffers and has_passed(self._cuda, buffers[0][1]):
            return buffers.popleft()[0]
        return np.frombuffer(self._cuda.alloc_pinned_memory(size), np.uint8, size)
