"""Memory of a kind of device: backends, which store arrays and copy them, and arenas, which lease them.

Only a backend knows how arrays get to its memory and back, and which work a copy must wait for.
This module has the protocols, and the backends of host memory; `ops/device.py` lists all by kind.

An arena reuses activation buffers, as PyTorch's caching allocator does. `take` leases a buffer. The
buffer returns by itself when the last array that refers to it dies. So layers need no bookkeeping,
and an exception leaks nothing. After the first step, returned buffers serve every lease, and
`allocations` stays constant. Steps that begin with `rewind` and lease in the same order use the
same addresses. `release` is the exception: it gives free memory back to the system, and later
leases allocate again.
"""

import ctypes
import math
import mmap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from mpitrain.machine.compiling import compiler
from mpitrain.machine.process import Kind

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


class LeaseSizes(dict[Any, Any]):
    """A cache {(shape, dtype): the properties that all leases of these have in common}.

    First come the bytes that a lease counts, and the bytes of the buffer that serves it. The free
    buffers of this size class follow, then the results of `ArenaMemory.maker`. It is a plain tuple,
    because Python unpacks a NamedTuple more slowly.

    free  the free buffers of each size class
    """

    def __init__(self, memory: ArenaMemory):
        self._memory = memory
        self.free: dict[int, list[Leased]] = {}

    def __missing__(self, key: tuple[tuple[int, ...], Any]) -> tuple[Any, ...]:
        if len(self) >= SHAPES:
            self.clear()
        shape, dtype = key[0], np.dtype(key[1])
        nbytes = padded(math.prod(shape) * dtype.itemsize)
        size = size_class(nbytes)
        free = self.free.setdefault(size, [])
        self[key] = properties = nbytes, size, free, *self._memory.maker(shape, dtype)
        return properties


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
        # A step leases the same shapes in each micro-batch, so their sizes are computed once.
        self._sizes = LeaseSizes(self._memory)

    @property
    def free(self) -> tuple[int, ...]:
        """The numbers of the free buffers, in the order that leases take them from."""
        return tuple(leased.number for free in self._sizes.free.values() for leased in free)

    def rewind(self) -> None:
        """Sort the free buffers, so that leases reuse them in the order of their allocation."""
        for free in self._sizes.free.values():
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
        every = [(size, leased) for size, free in self._sizes.free.items() for leased in free]
        idle = self._memory.idle([leased.buffer for _, leased in every])
        nbytes = 0
        for (size, leased), is_idle in zip(every, idle, strict=True):
            if is_idle:
                # Leases refer to this list, and a thread may end one meanwhile.
                self._sizes.free[size].remove(leased)
                nbytes += size
        return nbytes

    def take(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Lease an uninitialised, contiguous, 64-byte aligned array.

        Its buffer returns when the array and all its views have died.
        """
        nbytes, size, free, described, make = self._sizes[shape, dtype]
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
        *_, described, make = self._sizes[shape, dtype]
        lease = Lease()
        lease.state = self, buffer.nbytes, leased, free
        lease.__array_struct__ = described[self._memory.location(buffer)]
        return make(lease)

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


class Copy(Protocol):
    """Copy in flight, or an event in a stream of work.

    Neither end of a copy may be touched before `test` has returned True or `wait` has returned.
    """

    def test(self) -> bool:
        """Return whether the copy, or all work before the event, is complete; never blocks."""

    def wait(self) -> None:
        """Block until `test` would return True."""


class Backend(Protocol):
    """Memory that the ops of `kind` work on, and copies between it and host memory."""

    kind: Kind
    """Kind as in device.kind, but never "auto"."""

    def arena(self) -> Arena:
        """Return a new arena of this backend's memory."""

    def holds(self, array: Any) -> bool:
        """Return whether the array is in this backend's memory."""

    def zeros(self, count: int, dtype: Any) -> Any:
        """Return a zeroed 1-D array in this backend's memory."""

    def from_host(self, array: np.ndarray, arena: Arena | None = None) -> Any:
        """Return a contiguous copy of the array in this backend's memory; the array itself, if it is there.

        arena  leases the memory of the copy, if this backend's memory is not the host's
        """

    def put(self, target: Any, array: np.ndarray) -> None:
        """Write an array of host memory over `target`, an array of the same shape and dtype.

        The write is in the order of this backend's work. `array` may change at once.
        """

    def to_host(self, array: Any) -> np.ndarray:
        """Return the array in host memory, after the work that writes it; may be the same array."""

    def synchronize(self) -> None:
        """Block until all work started so far is done; on a GPU, on the current stream."""

    def mark(self) -> Mark | None:
        """Return a mark behind the work started so far; None where the host itself computes."""


@runtime_checkable
class DeviceBackend(Backend, Protocol):
    """Backend of GPU memory, with support for messages and for other processes of the host."""

    def staging(self, nbytes: int) -> np.ndarray:
        """Return page-locked host bytes, so that copies of the device overlap with host work."""

    def so_far(self) -> Copy:
        """Return an event behind all work started so far on the current stream."""

    def follow(self, place: Any) -> None:
        """Make later work on the current stream wait for an event (as cudaStreamWaitEvent).

        The host does not wait. The stream waits for the last record before this call.

        place  a result of `so_far`, `shared_event` or `open_event`
        """

    def aside(self) -> AbstractContextManager[Any]:
        """Return a context whose current stream is the stream of messages, not of the computation.

        The copies and the sums of messages run on this stream.
        """

    def start_copy(self, target: Any, source: Any, after: Copy) -> Copy:
        """Start to copy one contiguous array onto another on the stream of messages.

        One of the two arrays is staging memory.

        after   event behind the work that writes the source, or that still reads the target
        """

    def export(self, array: Any) -> tuple[str, int]:
        """Return the CUDA IPC handle of the array's allocation, and the offset of the array in it.

        Another process passes them to `open`. The array must outlive its use there.

        raises  CommError if the driver refuses
        """

    def open(self, handle: str, offset: int, like: Any) -> Any:
        """Map an array of another process; it is unmapped when its last view dies.

        handle, offset  as `export` returned them
        like            array of this process with the same shape and dtype
        raises          CommError if the driver refuses
        """

    def shared_event(self) -> Any:
        """Return a new event that other processes of the host can open; it is not recorded yet.

        It must outlive its use in those processes.

        raises  CommError if the driver refuses
        """

    def open_event(self, handle: str) -> Any:
        """Open a shared event of another process, for `follow`. It closes with its last reference.

        raises  CommError if the driver refuses
        """


class HostBackend:
    """NumPy arrays in host memory, which need no copies and no waits."""

    kind: Kind = "cpu"

    def arena(self) -> Arena:
        return Arena()

    def holds(self, array: Any) -> bool:
        return not on_device(array)

    def zeros(self, count: int, dtype: Any) -> np.ndarray:
        return np.zeros(count, dtype)

    def from_host(self, array: np.ndarray, arena: Arena | None = None) -> np.ndarray:
        return np.ascontiguousarray(array)

    def put(self, target: np.ndarray, array: np.ndarray) -> None:
        target[...] = array

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def synchronize(self) -> None:
        pass

    def mark(self) -> Mark | None:
        return None


class SimulatorBackend(HostBackend):
    """Backend of NumPy arrays for kernels compiled for the CPU; a launch has ended when it returns.

    raises  ConfigError if there is no compiler for them
    """

    kind: Kind = "cuda-sim"

    def __init__(self) -> None:
        compiler()

    def mark(self) -> Mark:
        return Passed(time.perf_counter())


class WithoutMemory(np.ndarray):
    """An array with shape, strides and dtype, but no memory: only what it would take is counted."""


def has_memory(array: Any) -> bool:
    """Return whether code that NumPy does not call may read and write the array."""
    return not isinstance(array, WithoutMemory)


def on_device(array: Any) -> bool:
    return hasattr(type(array), "__cuda_array_interface__")


def overlap(one: Any, other: Any) -> bool:
    """Return whether two contiguous arrays share bytes, in any memory."""
    start, begin = address(one), address(other)
    return start < begin + other.nbytes and begin < start + one.nbytes


def address(array: Any) -> int:
    """Return the address of an array's first element in its memory."""
    return array.data.ptr if on_device(array) else array.ctypes.data


def _first_field(array: np.ndarray) -> int:
    # NumPy's PyArrayObject begins with the header of every Python object, then this address.
    return _pointer(id(array) + object.__basicsize__).value or 0


def _by_ctypes(array: np.ndarray) -> int:
    return array.ctypes.data


_pointer, _probe = ctypes.c_void_p.from_address, np.zeros(1)
host_address = _first_field if _first_field(_probe) == _by_ctypes(_probe) else _by_ctypes
"""(array) -> the address of a NumPy array's first element.

`array.ctypes.data` takes a microsecond, and a call of C code needs up to nine addresses. The field
of NumPy's C structure takes a sixth of that.
"""


def copy_rows(target: Any, source: Any) -> None:
    """Copy one array onto another, in the order of the current stream (as cudaMemcpy2DAsync).

    An assignment would do on the host. But CuPy compiles a kernel for it if strides differ, or if
    the first dim is 1.

    target, source  of one shape and dtype, in one memory. If rows have gaps, a device copies each
                    matrix of the last two dims separately. Only if the last dim is not contiguous,
                    as in a transposed weight of another library, CuPy's kernel copies
    """
    if not on_device(target) or not has_memory(target):
        target[...] = source
        return
    if target.flags.c_contiguous and source.flags.c_contiguous:
        shape: Any = () if source.size == 1 else -1
        target.reshape(shape)[...] = source.reshape(shape)
        return
    if not (_has_rows(target) and _has_rows(source)):
        target[...] = source
        return
    if source.ndim > 2:
        for at in range(len(source)):
            copy_rows(target[at], source[at])
        return
    from cupy import cuda

    cuda.runtime.memcpy2DAsync(
        address(target),
        _pitch(target),
        address(source),
        _pitch(source),
        source.shape[1] * source.itemsize,
        source.shape[0],
        cuda.runtime.memcpyDefault,
        cuda.get_current_stream().ptr,
    )


def _has_rows(array: Any) -> bool:
    """Return whether the last dim is contiguous, and its rows do not overlap."""
    if array.ndim < 2:
        return False
    *_, rows, columns = array.shape
    *_, pitch, step = array.strides
    is_contiguous = columns == 1 or step == array.itemsize
    return is_contiguous and (rows == 1 or pitch >= columns * array.itemsize)


def _pitch(matrix: Any) -> int:
    """Return the bytes between the starts of two rows; of a single row, its length."""
    rows, columns = matrix.shape
    pitch: int = matrix.strides[0] if rows > 1 else columns * matrix.itemsize
    return pitch
