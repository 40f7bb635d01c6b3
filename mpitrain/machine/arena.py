"""The arena: activation buffers that are used again instead of allocated again.

`take` leases a buffer; it returns by itself when the last array that refers to it dies, so no layer keeps books and an
exception leaks nothing. After the first step every lease is served from what came back: `allocations` stands still.
"""

import math
from typing import Any, Protocol

import numpy as np

ALIGNMENT = 64  # bytes: a cache line, and a full AVX-512 register
SLAB = 32 << 20  # bytes obtained from the system at once


class Memory(Protocol):
    """Where an arena's buffers come from. A buffer is whatever `allocate` returns."""

    def allocate(self, nbytes: int) -> Any:
        """A new buffer that starts on a multiple of 64 bytes."""

    def array(self, buffer: Any, lease: "Lease", shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """The buffer's first bytes as an array; `lease` must live as long as that array or a view of it."""


class HostMemory:
    """Buffers of NumPy arrays. NumPy keeps a lease alive as the base of the arrays that were made from it.

    Buffers are cut from slabs, which NumPy asks the kernel to back with huge pages (it does from 4 MiB on): a training
    step walks through far more 4 KiB pages than the processor remembers. What a slab has left when the next buffer does
    not fit is lost, but was never touched.
    """

    def __init__(self) -> None:
        self._rest = np.empty(0, np.uint8)

    def allocate(self, nbytes: int) -> np.ndarray:
        if len(self._rest) < nbytes:
            raw = np.empty(max(nbytes, SLAB) + ALIGNMENT, np.uint8)
            self._rest = raw[-raw.ctypes.data % ALIGNMENT:]
        buffer, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return buffer

    def array(self, buffer: np.ndarray, lease: "Lease", shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        lease.__array_interface__ = {"data": (buffer.ctypes.data, False), "shape": shape, "typestr": dtype.str, "version": 3}
        return np.asarray(lease)


class Lease:
    """Possession of one buffer; it goes back to its arena when nothing refers to the lease any more."""

    __slots__ = ("__array_interface__", "_arena", "_buffer", "_nbytes")
    __array_interface__: dict[str, Any]

    def __init__(self, arena: "Arena", buffer: Any, nbytes: int):
        self._arena, self._buffer, self._nbytes = arena, buffer, nbytes

    def __del__(self) -> None:
        self._arena._take_back(self._buffer, self._nbytes)


class Arena:
    """Leases buffers by size.

    live, peak    bytes leased now, and the most there ever were
    allocations   buffers obtained from the system since construction
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self.live = self.peak = self.allocations = 0
        self._memory = memory or HostMemory()
        self._free: dict[int, list[Any]] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised, contiguous, 64-byte aligned array; its buffer returns when the array and its views die."""
        dtype = np.dtype(dtype)
        nbytes = -(-max(1, math.prod(shape) * dtype.itemsize) // ALIGNMENT) * ALIGNMENT
        free = self._free.setdefault(nbytes, [])
        buffer = free.pop() if free else self._allocate(nbytes)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        return self._memory.array(buffer, Lease(self, buffer, nbytes), tuple(shape), dtype)

    def _allocate(self, nbytes: int) -> Any:
        self.allocations += 1
        return self._memory.allocate(nbytes)

    def _take_back(self, buffer: Any, nbytes: int) -> None:
        self.live -= nbytes
        self._free[nbytes].append(buffer)
