"""Where arrays live: host memory through NumPy, GPU memory through CuPy, or host memory that plays a GPU's.

A backend is the only thing that knows how arrays get there and back, and what must be waited for on the way.
"""

import ctypes
import platform
import shutil
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mpitrain.errors import CommError, ConfigError
from mpitrain.machine.arena import Arena, Lease
from mpitrain.machine.kinds import KINDS, Kind
from mpitrain.machine.marks import CudaMark, Mark, Passed


class Copy(Protocol):
    """A copy under way, neither end of which may be touched before `test` has said True or `wait` has returned; or a place."""

    def test(self) -> bool:
        """True once the copy, or what was started before the place, is complete; never blocks."""

    def wait(self) -> None:
        """Block until then."""


class Backend(Protocol):
    """Moves arrays between host memory and the memory that the ops of `kind` work on."""

    kind: Kind
    """As in device.kind, but never auto."""

    def arena(self) -> Arena:
        """A fresh arena of this backend's memory."""

    def holds(self, array: Any) -> bool:
        """Whether the array lies in this backend's memory."""

    def zeros(self, count: int, dtype: Any) -> Any:
        """A zeroed 1-D array in this backend's memory."""

    def from_host(self, array: np.ndarray) -> Any:
        """The array in this backend's memory, contiguous; may be the same one."""

    def to_host(self, array: Any) -> np.ndarray:
        """The array in host memory, once the work that writes it is done; may be the same one."""

    def synchronize(self) -> None:
        """Wait for all the work that was started here."""

    def mark(self) -> Mark | None:
        """A mark behind the work that was started here; None where the host computes itself."""


@runtime_checkable
class DeviceBackend(Backend, Protocol):
    """A backend whose memory is not the host's: what messages need to get there, and other processes of the host."""

    def staging(self, nbytes: int) -> np.ndarray:
        """Page-locked host bytes, which a device copies to and from while the host does something else."""

    def so_far(self) -> Copy:
        """The place behind all the work that was started here so far."""

    def follow(self, place: Copy) -> None:
        """Let the work that is started here from now on wait for what is before the place; nobody waits on the host."""

    def aside(self) -> AbstractContextManager[Any]:
        """Within it `here` is a place beside the computation: the stream of messages, of the copies and sums that make them."""

    def start_copy(self, target: Any, source: Any, after: Copy) -> Copy:
        """Begin to copy one contiguous array onto another, one of them staging, beside the work under way.

        after   a place behind the work that writes the source, or still reads the target
        """

    def gpus(self) -> tuple[str, list[str]]:
        """PCI addresses of this process's GPU and of all that it sees."""

    def export(self, array: Any) -> tuple[str, int]:
        """What another process needs to `open` the array, which must live as long: a handle of its allocation, its place there.

        raises  CommError if the driver refuses
        """

    def open(self, handle: str, offset: int, like: Any) -> Any:
        """Another process's array, alike in shape and dtype to one of this process's; unmapped when its last view dies.

        raises  CommError if the driver refuses
        """


class HostBackend:
    """NumPy arrays in host memory: nothing to move, nothing to wait for."""

    kind: Kind = "cpu"

    def arena(self) -> Arena:
        return Arena()

    def holds(self, array: Any) -> bool:
        return not on_device(array)

    def zeros(self, count: int, dtype: Any) -> np.ndarray:
        return np.zeros(count, dtype)

    def from_host(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array)

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def synchronize(self) -> None:
        pass

    def mark(self) -> Mark | None:
        return None


class SimulatorBackend(HostBackend):
    """NumPy arrays for kernels that g++ has compiled; a launch has ended when it returns.

    raises  ConfigError where there is no such compiler
    """

    kind = "cuda-sim"

    def __init__(self) -> None:
        compiler()

    def mark(self) -> Mark:
        return Passed(time.perf_counter())


class CudaBackend:
    """CuPy arrays on the current GPU, out of CuPy's default pool; work runs on the current stream.

    Pools that allocate in stream order (cudaMallocAsync) are not used: their memory cannot be handed to other processes,
    and has crashed MPI libraries that tried (openucx/ucx#7194).

    raises  ConfigError without CuPy, a driver or a GPU
    """

    kind: Kind = "cuda"

    def __init__(self) -> None:
        self._cupy = cupy_with_gpu()
        self._messages = self._cupy.cuda.Stream(non_blocking=True)

    def arena(self) -> Arena:
        return Arena(_CudaMemory(self._cupy))

    def holds(self, array: Any) -> bool:
        return on_device(array)

    def zeros(self, count: int, dtype: Any) -> Any:
        return self._cupy.zeros(count, dtype)

    def from_host(self, array: np.ndarray) -> Any:
        return self._cupy.asarray(np.ascontiguousarray(array))

    def to_host(self, array: Any) -> np.ndarray:
        return self._cupy.asnumpy(array)

    def synchronize(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()

    def mark(self) -> Mark:
        return CudaMark(self._cupy.cuda)

    def staging(self, nbytes: int) -> np.ndarray:
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(max(1, nbytes)), np.uint8, nbytes)

    def so_far(self) -> Copy:
        return self._placed(self._cupy.cuda.get_current_stream())

    def follow(self, place: Any) -> None:
        self._cupy.cuda.get_current_stream().wait_event(place.event)

    def aside(self) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = self._messages
        return stream

    def start_copy(self, target: Any, source: Any, after: Any) -> Copy:
        runtime = self._cupy.cuda.runtime
        self._messages.wait_event(after.event)
        runtime.memcpyAsync(address(target), address(source), source.nbytes, runtime.memcpyDefault, self._messages.ptr)
        return self._placed(self._messages, target, source)

    def _placed(self, stream: Any, *ends: Any) -> "_CudaPlace":
        return _CudaPlace(stream.record(self._cupy.cuda.Event(disable_timing=True)), ends)

    def gpus(self) -> tuple[str, list[str]]:
        runtime = self._cupy.cuda.runtime
        seen = [runtime.deviceGetPCIBusId(index) for index in range(runtime.getDeviceCount())]
        return seen[runtime.getDevice()], seen

    def export(self, array: Any) -> tuple[str, int]:
        try:
            start = _allocation_start(array.data.ptr)
            return self._cupy.cuda.runtime.ipcGetMemHandle(start).hex(), array.data.ptr - start
        except (OSError, self._cupy.cuda.runtime.CUDARuntimeError) as error:
            raise CommError(f"GPU memory cannot be handed to other processes: {error}.") from None

    def open(self, handle: str, offset: int, like: Any) -> Any:
        cuda = self._cupy.cuda
        try:
            opened = _Opened(cuda.runtime, bytes.fromhex(handle))
        except cuda.runtime.CUDARuntimeError as error:
            raise CommError(f"GPU memory of another process cannot be opened: {error}.") from None
        memory = cuda.UnownedMemory(opened.address + offset, like.nbytes, opened, like.data.device_id)
        return self._cupy.ndarray(like.shape, like.dtype, cuda.MemoryPointer(memory, 0))


class _CudaMemory:
    """Buffers of CuPy's default pool."""

    def __init__(self, cupy: ModuleType):
        self._cupy = cupy

    def allocate(self, nbytes: int) -> Any:
        return self._cupy.empty(nbytes, np.uint8)  # the pool cuts at multiples of 512 bytes

    def array(self, buffer: Any, lease: Lease, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        # A view keeps its memory object, and that its owner: the lease lives as long as the last of them.
        memory = self._cupy.cuda.UnownedMemory(buffer.data.ptr, buffer.nbytes, lease, buffer.data.device_id)
        return self._cupy.ndarray(shape, dtype, self._cupy.cuda.MemoryPointer(memory, 0))


class _CudaPlace:
    """A place in a stream, reached with its event; behind a copy it keeps both ends alive."""

    def __init__(self, event: Any, ends: tuple[Any, ...]):
        self.event, self._ends = event, ends

    def test(self) -> bool:
        return self.event.done

    def wait(self) -> None:
        self.event.synchronize()


class _Opened:
    """An allocation of another process, mapped into this one until nothing refers to it. The driver counts how often."""

    def __init__(self, runtime: ModuleType, handle: bytes):
        self.address = runtime.ipcOpenMemHandle(handle)
        weakref.finalize(self, runtime.ipcCloseMemHandle, self.address)


def _allocation_start(address: int) -> int:
    """Where the driver's allocation begins that an array lies in: CuPy's pools cut one into many, and handles are of whole ones.

    raises  OSError if the driver is not there or does not know the address
    """
    start = ctypes.c_uint64()
    status = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2(ctypes.byref(start), None, ctypes.c_uint64(address))
    if status:
        raise OSError(f"the driver does not know address {address:#x} (error {status})")
    return start.value


def on_device(array: Any) -> bool:
    """Whether the array lies in GPU memory."""
    return hasattr(type(array), "__cuda_array_interface__")


def overlap(one: Any, other: Any) -> bool:
    """Whether two contiguous arrays have bytes in common, wherever they lie."""
    start, begin = address(one), address(other)
    return start < begin + other.nbytes and begin < start + one.nbytes


def address(array: Any) -> int:
    """Where an array begins, in the memory that it lies in."""
    return array.data.ptr if on_device(array) else array.ctypes.data


def cupy_with_gpu() -> ModuleType:
    """CuPy; ConfigError where it is not installed, or finds no driver or no GPU."""
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"device.kind cuda needs CuPy, but it cannot be imported: {error}.",
            "Install it for your driver: pip install 'mpitrain[cuda13]', or [cuda12]; or use --device cpu.") from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(f"device.kind cuda needs a GPU and its driver, but CuPy {cupy.__version__} says {error}.",
                          "Install NVIDIA's driver (`nvidia-smi` must list a GPU), or use --device cpu.") from None
    if not count:
        raise ConfigError(f"device.kind cuda needs a GPU, but CuPy {cupy.__version__} sees none.",
                          "Look at CUDA_VISIBLE_DEVICES, or use --device cpu.")
    return cupy


def compiler() -> str:
    """The path of g++, which compiles kernels for the simulator; ConfigError where it is missing, or could not work."""
    path, machine = shutil.which("g++"), platform.machine()
    if machine != "x86_64" or path is None:
        missing = f"this machine is {machine}" if machine != "x86_64" else "there is no g++ here"
        raise ConfigError(f"device.kind cuda-sim compiles kernels with g++ 11 or later on x86-64, but {missing}.",
                          "Install g++ on an x86-64 machine (apt install g++), or use --device cpu.")
    return path


BACKENDS: dict[str, Callable[[], Backend]] = {
    backend.kind: backend for backend in (HostBackend, SimulatorBackend, CudaBackend)}


def backend_for(kind: str) -> Backend:
    """The backend of a resolved device.kind; ConfigError where this machine lacks what the kind needs."""
    if kind not in KINDS:
        raise ConfigError(f"There is no device of kind {kind!r} to compute on.", f"Name one of {', '.join(KINDS)}.")
    return BACKENDS[kind]()
