"""The arena: activation buffers that are used again instead of allocated again.

`take` leases a buffer; it returns by itself when the last array that refers to it dies, so no layer keeps books and an
exception leaks nothing. After the first step every lease is served from what came back: `allocations` stands still.
"""

from typing import Any

import numpy as np

ALIGNMENT = 64  # bytes: a cache line, and a full AVX-512 register


class _Lease:
    """Owner of one buffer while arrays refer to it; NumPy keeps it alive as the base of those arrays."""

    __slots__ = ("__array_interface__", "_arena", "_buffer")

    def __init__(self, arena: "Arena", buffer: np.ndarray, shape: tuple[int, ...], dtype: np.dtype):
        self._arena, self._buffer = arena, buffer
        self.__array_interface__ = {
            "data": (buffer.ctypes.data, False), "shape": shape, "typestr": dtype.str, "version": 3,
        }

    def __del__(self) -> None:
        self._arena._take_back(self._buffer)


class Arena:
    """Leases host buffers by size.

    live, peak    bytes leased now, and the most there ever were
    allocations   buffers obtained from the system since construction
    """

    def __init__(self) -> None:
        self.live = self.peak = self.allocations = 0
        self._free: dict[int, list[np.ndarray]] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An uninitialised, contiguous, 64-byte aligned array; its buffer returns when the array and its views die."""
        dtype = np.dtype(dtype)
        nbytes = -(-max(1, int(np.prod(shape)) * dtype.itemsize) // ALIGNMENT) * ALIGNMENT
        free = self._free.setdefault(nbytes, [])
        buffer = free.pop() if free else self._allocate(nbytes)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        return np.asarray(_Lease(self, buffer, tuple(shape), dtype))

    def _allocate(self, nbytes: int) -> np.ndarray:
        self.allocations += 1
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start:start + nbytes]

    def _take_back(self, buffer: np.ndarray) -> None:
        self.live -= buffer.nbytes
        self._free[buffer.nbytes].append(buffer)
