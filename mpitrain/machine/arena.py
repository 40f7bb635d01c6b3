"""The arena: activation buffers that are used again instead of allocated again.

`take` leases a buffer; it returns by itself when the last array that refers to it dies, so no layer keeps books and an
exception leaks nothing. After the first step every lease is served from what came back: `allocations` stands still. Steps that
begin with `rewind` and lease alike use the same addresses.
"""

import math
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

ALIGNMENT = 64  # bytes: a cache line, and a full AVX-512 register
SLAB = 32 << 20  # bytes obtained from the system at once


class Memory(Protocol):
    """Where an arena's buffers come from: contiguous arrays of bytes."""

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
            self._rest = raw[-raw.ctypes.data % ALIGNMENT :]
        buffer, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return buffer

    def array(
        self, buffer: np.ndarray, lease: "Lease", shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        typestr = (
            f"|V{dtype.itemsize}" if dtype.kind == "V" else dtype.str
        )  # of bfloat16, which no typestr tells
        lease.__array_interface__ = {
            "data": (buffer.ctypes.data, False),
            "shape": shape,
            "typestr": typestr,
            "version": 3,
        }
        return np.asarray(lease).view(dtype)


class Lease:
    """Possession of a buffer. When nothing refers to the lease any more, what is leased is free again.

    leased  the buffer, or what keeps it alive
    free    where it goes back to
    """

    __slots__ = ("__array_interface__", "_arena", "_free", "_leased", "_nbytes")
    __array_interface__: dict[str, Any]

    def __init__(self, arena: "Arena", nbytes: int, leased: Any, free: list[Any]):
        self._arena, self._nbytes, self._leased, self._free = arena, nbytes, leased, free

    def __del__(self) -> None:
        self._arena.live -= self._nbytes
        self._free.append(self._leased)


class Arena:
    """Leases buffers by class of size, and counts those that others own and lease out by it.

    live, peak    bytes leased now, and the most there ever were
    held          bytes obtained from the system, whole classes, leased or not
    allocations   buffers obtained from the system since construction
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self.live = self.peak = self.held = self.allocations = 0
        self._memory = memory or HostMemory()
        self._free: dict[
            int, list[tuple[int, Any]]
        ] = {}  # by class, the buffers with their numbers

    def rewind(self) -> None:
        """Lease what is free now in the order in which it was made, whatever the order in which it came back."""
        for free in self._free.values():
            free.sort(key=_number, reverse=True)

    def take(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised, contiguous, 64-byte aligned array; its buffer returns when the array and its views die."""
        dtype = np.dtype(dtype)
        nbytes = padded(math.prod(shape) * dtype.itemsize)
        size = size_class(nbytes)
        free = self._free.setdefault(size, [])
        leased = free.pop() if free else self._allocated(size)
        return self.lend(leased[1], shape, dtype, leased, free, nbytes)

    def lend(
        self,
        buffer: Any,
        shape: tuple[int, ...],
        dtype: np.dtype,
        leased: Any,
        free: list[Any],
        nbytes: int = 0,
    ) -> Any:
        """The first bytes of a buffer as an array. When that and its views have died, `leased` is added to `free`.

        buffer  of bytes, contiguous, in this arena's memory; `leased` keeps it alive
        nbytes  that count as leased; 0: all of the buffer's
        """
        nbytes = nbytes or buffer.nbytes
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        return self._memory.array(buffer, Lease(self, nbytes, leased, free), tuple(shape), dtype)

    def _allocated(self, size: int) -> tuple[int, Any]:
        self.allocations += 1
        self.held += size
        return self.allocations, self._memory.allocate(size)


def size_class(nbytes: int) -> int:
    """Bytes of the buffer that so many bytes are leased in: eight sizes from a power of two to the next, multiples of 64."""
    step = max(ALIGNMENT, 1 << (nbytes - 1).bit_length() >> 4)
    return -(-nbytes // step) * step


def _number(leased: tuple[int, Any]) -> int:
    return leased[0]


def padded(nbytes: int) -> int:
    """So many bytes as they are leased: whole cache lines, at least one."""
    return -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT
