"""The arena: reuses activation buffers, as PyTorch's caching allocator does.

`take` leases a buffer. The buffer returns by itself when the last array that refers to it dies.
So layers need no bookkeeping, and an exception leaks nothing. After the first step, returned
buffers serve every lease, and `allocations` stays constant. Steps that begin with `rewind` and
lease in the same order use the same addresses. `release` is the exception: it gives free memory
back to the system, and later leases allocate again.
"""

import math
import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

ALIGNMENT = 64  # bytes: a cache line, and a full AVX-512 register
SLAB = 32 << 20  # bytes obtained from the system at once
SHAPES = 1 << 12  # shapes of leases that are remembered


Maker = Callable[["Lease"], Any]
"""(lease) -> the array that its description names; the lease lives as long as any view of it."""


class Descriptions(dict[Any, Any]):
    """A cache {location in memory: description of an array there}, for arrays of one shape and dtype.

    describe  (location) -> the description
    """

    def __init__(self, describe: Callable[[Any], Any]):
        self._describe = describe

    def __missing__(self, location: Any) -> Any:
        description = self[location] = self._describe(location)
        return description


class ArenaMemory(Protocol):
    """Allocator of an arena: contiguous arrays of bytes in one kind of memory."""

    def allocate(self, nbytes: int) -> Any:
        """Allocate a buffer that starts at a multiple of 64 bytes."""

    def location(self, buffer: Any) -> Any:
        """Return the start of a buffer, as a key of the descriptions of `maker`."""

    def maker(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Any, Maker]:
        """Return {location: description} of arrays of one shape, and a function that makes the arrays.

        Neither refers to a buffer.
        """

    def idle(self, buffers: Sequence[Any]) -> list[bool]:
        """Return whether the system can have each of these free buffers, and forget it then."""

    def trim(self) -> None:
        """Give memory back that no array refers to."""


class HostMemory:
    """Allocator of host memory, as NumPy arrays.

    NumPy keeps a lease alive as the base of the arrays that were made from it. NumPy's description
    of each array is made once (the array interface protocol, version 3). Buffers are cut from
    slabs of 32 MiB in huge pages. With pages of 4 KiB, a training step would touch far more pages
    than the TLB holds. The end of a slab is lost if the next buffer does not fit. No page of that
    end was ever touched. A slab is a mapping of its own, which ends with its last buffer: malloc
    might keep the memory.
    """

    def __init__(self) -> None:
        self._rest = np.empty(0, np.uint8)
        self._cut = Counter[int]()  # {id of a slab: buffers that were cut from it}

    def allocate(self, nbytes: int) -> np.ndarray:
        if len(self._rest) < nbytes:
            self._rest = _mapped(max(nbytes, SLAB))
        buffer, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        self._cut[id(buffer.base)] += 1
        return buffer

    def location(self, buffer: np.ndarray) -> int:
        return buffer.ctypes.data

    def idle(self, buffers: Sequence[np.ndarray]) -> list[bool]:
        """Return which buffers can be given back. A slab goes back as a whole, so all its buffers
        must be free.
        """
        slabs = [id(buffer.base) for buffer in buffers]
        gone = {slab for slab, count in Counter(slabs).items() if count == self._cut[slab]}
        if id(self._rest.base) in gone:
            self._rest = np.empty(0, np.uint8)
        for slab in gone:
            del self._cut[slab]
        return [slab in gone for slab in slabs]

    def trim(self) -> None:
        """Do nothing: a mapping has ended with its last buffer."""

    def maker(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Any, Maker]:
        # bfloat16 has no typestr of its own, so it is declared as raw bytes.
        is_raw = dtype.kind == "V"
        typestr = f"|V{dtype.itemsize}" if is_raw else dtype.str
        described = Descriptions(lambda address: _described(address, shape, typestr))
        return described, (lambda lease: np.asarray(lease).view(dtype)) if is_raw else np.asarray


class Lease:
    """Ownership of a leased buffer, which ends with the last reference to this object.

    An arena makes some hundred leases in a micro-batch, so a lease has no constructor.

    state             the arena; the bytes that count as leased; the buffer, or an object that keeps
                      it alive; the list that gets this object back at the end
    __array_struct__  the description of the array, under the name that NumPy reads
    """

    __slots__ = ("__array_struct__", "state")
    __array_struct__: Any
    state: tuple["Arena", int, Any, list[Any]]

    @property
    def nbytes(self) -> int:
        return self.state[1]

    def __del__(self) -> None:
        arena, nbytes, leased, free = self.state
        arena.live -= nbytes
        free.append(leased)


class Leased(NamedTuple):
    """A buffer of an arena.

    number    of its allocation, from 1
    location  of its first byte, as `ArenaMemory.location` returns it
    """

    number: int
    buffer: Any
    location: Any


LeaseSize = tuple[int, int, list[Leased], Any, Maker]
"""The properties that all leases of one shape and dtype have in common.

First come the bytes that a lease counts, and the bytes of the buffer that serves it. The free
buffers of this size class follow, then the results of `ArenaMemory.maker`. It is a plain tuple,
because Python unpacks a NamedTuple more slowly.
"""


class Arena:
    """Pool of buffers by size class; it also counts leases of buffers that other objects own.

    live, peak    bytes leased now, and their maximum so far
    held          bytes obtained from the system, as whole size classes, leased or not
    allocations   number of buffers obtained from the system so far
    released      largest number of bytes that one `release` returned to the system
    """

    def __init__(self, memory: ArenaMemory | None = None) -> None:
        self.live = self.peak = self.held = self.allocations = self.released = 0
        self._memory = memory or HostMemory()
        self._free: dict[int, list[Leased]] = {}  # The free buffers of each size class.
        # A step leases the same shapes in each micro-batch, so their sizes are computed once.
        self._sizes: dict[tuple[tuple[int, ...], Any], LeaseSize] = {}

    @property
    def free(self) -> tuple[int, ...]:
        """The numbers of the free buffers, in the order that leases take them from."""
        return tuple(leased.number for free in self._free.values() for leased in free)

    def rewind(self) -> None:
        """Sort the free buffers, so that leases reuse them in the order of their allocation."""
        for free in self._free.values():
            free.sort(key=attrgetter("number"), reverse=True)

    def release(self) -> int:
        """Give memory without leases back to the system, and return its bytes.

        Host memory goes back in slabs, device memory in buffers. Buffers that other objects own
        stay, as those of collectives.
        """
        nbytes = self._dropped()
        self._sizes.clear()
        self._memory.trim()
        self.held -= nbytes
        self.released = max(self.released, nbytes)
        return nbytes

    def _dropped(self) -> int:
        every = [(size, leased) for size, free in self._free.items() for leased in free]
        idle = self._memory.idle([leased.buffer for _, leased in every])
        nbytes = 0
        for (size, leased), is_idle in zip(every, idle, strict=True):
            if is_idle:
                # Leases refer to this list, and a thread may end one meanwhile.
                self._free[size].remove(leased)
                nbytes += size
        return nbytes

    def take(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Lease an uninitialised, contiguous, 64-byte aligned array.

        Its buffer returns when the array and all its views have died.
        """
        try:
            nbytes, size, free, described, make = self._sizes[shape, dtype]
        except (KeyError, TypeError):
            # The lease is the first of its shape, or the shape is a list.
            shape = tuple(shape)
            nbytes, size, free, described, make = self._size(shape, dtype)
        leased = free.pop() if free else self._allocated(size)
        self.live = live = self.live + nbytes
        if live > self.peak:
            self.peak = live
        lease = Lease()
        lease.state = self, nbytes, leased, free
        lease.__array_struct__ = described[leased.location]
        return make(lease)

    def lend(
        self, buffer: Any, shape: tuple[int, ...], dtype: np.dtype, leased: Any, free: list[Any]
    ) -> Any:
        """Lease the first bytes of a buffer of any owner as an array.

        When the array and all its views have died, `leased` is appended to `free`.

        buffer  contiguous bytes in this arena's memory, all of which count as leased; `leased`
                keeps it alive
        """
        self.live += buffer.nbytes
        self.peak = max(self.peak, self.live)
        *_, described, make = self._size(tuple(shape), dtype)
        lease = Lease()
        lease.state = self, buffer.nbytes, leased, free
        lease.__array_struct__ = described[self._memory.location(buffer)]
        return make(lease)

    def _size(self, shape: tuple[int, ...], dtype: Any) -> LeaseSize:
        if properties := self._sizes.get((shape, dtype)):
            return properties
        if len(self._sizes) >= SHAPES:
            self._sizes.clear()
        exact = np.dtype(dtype)
        nbytes = padded(math.prod(shape) * exact.itemsize)
        size = size_class(nbytes)
        free = self._free.setdefault(size, [])
        self._sizes[shape, dtype] = properties = (
            nbytes,
            size,
            free,
            *self._memory.maker(shape, exact),
        )
        return properties

    def _allocated(self, size: int) -> Leased:
        self.allocations += 1
        self.held += size
        buffer = self._memory.allocate(size)
        return Leased(self.allocations, buffer, self._memory.location(buffer))


def size_class(nbytes: int) -> int:
    """Return the size of the buffer that serves a lease of `nbytes`.

    There are eight sizes from one power of two to the next, all multiples of 64.
    """
    step = max(ALIGNMENT, 1 << (nbytes - 1).bit_length() >> 4)
    return -(-nbytes // step) * step


def _described(address: int, shape: tuple[int, ...], typestr: str) -> Any:
    """Return NumPy's description of an array. It is no reference to the memory."""
    interface = {"data": (address, False), "shape": shape, "typestr": typestr, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface)).__array_struct__


def _mapped(nbytes: int) -> np.ndarray:
    """Return a slab: private memory of the system, in huge pages where these exist."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def padded(nbytes: int) -> int:
    """Return the bytes that a lease of `nbytes` counts: whole cache lines, at least one."""
    return -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT
