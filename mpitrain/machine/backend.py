"""Backends: where arrays live; `ops/device.py` lists them by kind.

Only a backend knows how arrays get to its memory and back, and which work a copy must wait for.
This module has the protocols, the backends of host memory, and copies within one memory.
"""

import ctypes
import time
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mpitrain.machine.arena import Arena
from mpitrain.machine.compiling import compiler
from mpitrain.machine.process import Kind


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
