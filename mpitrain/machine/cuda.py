"""GPU memory through CuPy."""

import ctypes
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from types import ModuleType
from typing import Any

import numpy as np

from mpitrain.errors import CommError, ConfigError, KernelError
from mpitrain.machine.backend import (
    Arena,
    Copy,
    Descriptions,
    Lease,
    Maker,
    Mark,
    address,
    on_device,
)
from mpitrain.machine.process import Kind

NOT_READY = 600
"""cudaErrorNotReady: the device has not passed an event."""


class CudaMark:
    def __init__(self, cuda: Any):
        self._cuda, self._event = cuda, cuda.get_current_stream().record(cuda.Event())

    def test(self) -> bool:
        return has_passed(self._cuda, self._event)

    def since(self, earlier: "CudaMark") -> float:
        # CUDA returns milliseconds.
        return self._cuda.get_elapsed_time(earlier._event, self._event) / 1e3


class SharedEvent:
    """CUDA event that this process records repeatedly, and for which other processes of the host wait.

    handle  the CUDA IPC handle, in hexadecimal digits
    raises  CUDARuntimeError if the driver refuses to share it
    """

    def __init__(self, cuda: Any):
        self._cuda = cuda
        self.event = cuda.Event(disable_timing=True, interprocess=True)
        self.handle: str = cuda.runtime.ipcGetEventHandle(self.event.ptr).hex()

    def record(self) -> None:
        """Record the event behind all work started so far on the current stream."""
        self._cuda.get_current_stream().record(self.event)


class OpenedEvent:
    """CUDA event of another process. It closes with the last reference to this object.

    raises  CUDARuntimeError if the driver refuses
    """

    def __init__(self, cuda: Any, handle: str):
        self.ptr = cuda.runtime.ipcOpenEventHandle(bytes.fromhex(handle))
        # At the exit of the process the driver closes the event.
        weakref.finalize(self, cuda.runtime.eventDestroy, self.ptr).atexit = False

    @property
    def event(self) -> "OpenedEvent":
        """The event for `wait_event` of a stream, which reads its `ptr`."""
        return self


def has_passed(cuda: Any, event: Any) -> bool:
    """Return whether the device has passed an event; never blocks.

    CuPy's `Event.done` stays False if the device has failed, so a loop that polls it has no end.

    cuda    the module cupy.cuda
    raises  CUDARuntimeError if the device has failed
    """
    status = cuda.runtime.eventQuery(event.ptr)
    if status in (0, NOT_READY):
        return status == 0
    silence_destructors(cuda.runtime.CUDARuntimeError)
    raise cuda.runtime.CUDARuntimeError(status)


def silence_destructors(failure: type[BaseException]) -> None:
    """Print nothing more of an error of this type in a destructor.

    After a failure of the device every event and allocation fails when it is freed. These messages
    would hide the first one.
    """
    if not isinstance(sys.unraisablehook, _Silence):
        sys.unraisablehook = _Silence(failure, sys.unraisablehook)


class _Silence:
    def __init__(self, failure: type[BaseException], report: Callable[[Any], object]):
        self._failure, self._report = failure, report

    def __call__(self, unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, self._failure):
            self._report(unraisable)


class CudaBackend:
    """Backend of CuPy arrays on the current GPU, in CuPy's default pool; uses the current stream.

    Pools that allocate in stream order (cudaMallocAsync) are not used. Other processes cannot open
    their memory, and attempts have crashed MPI libraries (openucx/ucx#7194).

    raises  ConfigError without CuPy, a driver or a GPU
    """

    kind: Kind = "cuda"

    def __init__(self) -> None:
        self._cupy = cupy_with_gpu()
        self._messages = self._cupy.cuda.Stream(non_blocking=True)
        self._pinned = PinnedCopies(self._cupy)
        # The stream whose work becomes a graph; the default stream cannot be captured.
        self._captures: Any = None
        self._is_capturing = False

    def arena(self) -> Arena:
        return Arena(_CudaMemory(self._cupy))

    def holds(self, array: Any) -> bool:
        return on_device(array)

    def zeros(self, count: int, dtype: Any) -> Any:
        return self._cupy.zeros(count, dtype)

    def from_host(self, array: np.ndarray, arena: Arena | None = None) -> Any:
        if self.holds(array):
            return array
        if arena is None:
            return self._cupy.asarray(np.ascontiguousarray(array))
        target = arena.take(array.shape, array.dtype)
        self.put(target, array)
        return target

    def put(self, target: Any, array: np.ndarray) -> None:
        if self._is_capturing:
            raise KernelError("It copies numbers from the host, as random masks do in each step.")
        array = np.ascontiguousarray(array)
        if array.nbytes > LARGEST:
            # The driver may read pageable memory later, for example on Grace.
            target.set(array)
            self.synchronize()
        else:
            self._pinned.put(target, array)

    def to_host(self, array: Any) -> np.ndarray:
        if self._is_capturing:
            raise KernelError("It reads the device on the host.")
        return self._cupy.asnumpy(array)

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture the launches of `work` as a CUDA graph, without running them; return its launch.

        A launch of the graph is in the order of the current stream. It repeats all launches and
        copies within the device, with the same addresses and numbers. Nothing of it is on the host.

        raises  KernelError if `work` needs the host, which may have happened after a part of it
        """
        failure = self._cupy.cuda.runtime.CUDARuntimeError
        self._captures = stream = self._captures or self._cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            self._is_capturing = True
            try:
                work()
                graph = stream.end_capture()
            except BaseException as error:
                with suppress(failure):  # An invalid capture has to be ended all the same.
                    stream.end_capture()
                if isinstance(error, RuntimeError):  # Of the driver, or of CuPy about cuBLAS.
                    raise KernelError(f"It cannot be captured: {error}.") from None
                raise
            finally:
                self._is_capturing = False
        return lambda: graph.launch()

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
        runtime.memcpyAsync(
            address(target),
            address(source),
            source.nbytes,
            runtime.memcpyDefault,
            self._messages.ptr,
        )
        return self._placed(self._messages, target, source)

    def _placed(self, stream: Any, *ends: Any) -> "_CudaPlace":
        cuda = self._cupy.cuda
        return _CudaPlace(cuda, stream.record(cuda.Event(disable_timing=True)), ends)

    def export(self, array: Any) -> tuple[str, int]:
        try:
            start = _allocation_start(array.data.ptr)
            return self._cupy.cuda.runtime.ipcGetMemHandle(start).hex(), array.data.ptr - start
        except (OSError, self._cupy.cuda.runtime.CUDARuntimeError) as error:
            raise CommError(f"GPU memory cannot be handed to other processes: {error}.") from None

    def open(self, handle: str, offset: int, like: Any) -> Any:
        cuda = self._cupy.cuda
        try:
            opened = _OpenedMemory(cuda.runtime, bytes.fromhex(handle))
        except cuda.runtime.CUDARuntimeError as error:
            raise CommError(f"GPU memory of another process cannot be opened: {error}.") from None
        memory = cuda.UnownedMemory(
            opened.address + offset, like.nbytes, opened, like.data.device_id
        )
        return self._cupy.ndarray(like.shape, like.dtype, cuda.MemoryPointer(memory, 0))

    def shared_event(self) -> SharedEvent:
        try:
            return SharedEvent(self._cupy.cuda)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise CommError(f"GPU events cannot be shared with other processes: {error}.") from None

    def open_event(self, handle: str) -> OpenedEvent:
        try:
            return OpenedEvent(self._cupy.cuda, handle)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise CommError(f"GPU events of another process cannot be opened: {error}.") from None


class _CudaMemory:
    def __init__(self, cupy: ModuleType):
        self._cupy = cupy

    def allocate(self, nbytes: int) -> Any:
        return self._cupy.empty(nbytes, np.uint8)  # the pool cuts at multiples of 512 bytes

    def idle(self, buffers: Sequence[Any]) -> list[bool]:
        return [True] * len(buffers)

    def trim(self) -> None:
        self._cupy.get_default_memory_pool().free_all_blocks()

    def location(self, buffer: Any) -> Any:
        return buffer.data.ptr, buffer.nbytes, buffer.data.device_id

    def maker(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Any, Maker]:
        cupy, cuda = self._cupy, self._cupy.cuda

        def array(lease: Lease) -> Any:
            # A view refers to its memory object, which refers to its owner, the lease. So the
            # lease lives as long as the last view.
            address, nbytes, gpu = lease.__array_struct__
            memory = cuda.UnownedMemory(address, nbytes, lease, gpu)
            return cupy.ndarray(shape, dtype, cuda.MemoryPointer(memory, 0))

        return Descriptions(lambda location: location), array


class _CudaPlace:
    """Event in a stream; after a copy, it keeps both arrays alive."""

    def __init__(self, cuda: Any, event: Any, ends: tuple[Any, ...]):
        self._cuda, self.event, self._ends = cuda, event, ends

    def test(self) -> bool:
        return has_passed(self._cuda, self.event)

    def wait(self) -> None:
        self.event.synchronize()


class _OpenedMemory:
    """Allocation of another process, mapped into this one until no reference is left.

    The driver counts how often an allocation is mapped.
    """

    def __init__(self, runtime: ModuleType, handle: bytes):
        self.address = runtime.ipcOpenMemHandle(handle)
        weakref.finalize(self, _close, runtime, self.address)


def _close(runtime: ModuleType, address: int) -> None:
    runtime.deviceSynchronize()  # The host does not wait for the work on this memory.
    runtime.ipcCloseMemHandle(address)


def _allocation_start(address: int) -> int:
    """Return the start of the driver's allocation that contains an address.

    CuPy's pools cut one allocation into many arrays, but an IPC handle is for a whole allocation.

    raises  OSError if the driver is missing or does not know the address
    """
    start = ctypes.c_uint64()
    status = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2(
        ctypes.byref(start), None, ctypes.c_uint64(address)
    )
    if status:
        raise OSError(f"the driver does not know address {address:#x} (error {status})")
    return start.value


def cupy_with_gpu() -> ModuleType:
    """Import CuPy; ConfigError if it is not installed, or finds no driver or no GPU."""
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"device.kind cuda needs CuPy, but it cannot be imported: {error}.",
            "Install it for your driver: pip install 'mpitrain[cuda13]', or [cuda12]; or use --device cpu.",
        ) from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(
            f"device.kind cuda needs a GPU and its driver, but CuPy {cupy.__version__} says {error}.",
            "Install NVIDIA's driver (`nvidia-smi` must list a GPU), or use --device cpu.",
        ) from None
    if not count:
        raise ConfigError(
            f"device.kind cuda needs a GPU, but CuPy {cupy.__version__} sees none.",
            "Look at CUDA_VISIBLE_DEVICES, or use --device cpu.",
        )
    return cupy


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
        buffers = self._buffers[size]
        if buffers and has_passed(self._cuda, buffers[0][1]):
            return buffers.popleft()[0]
        return np.frombuffer(self._cuda.alloc_pinned_memory(size), np.uint8, size)


HOST = (1, 3, 11)
"""DLPack's numbers of host memory: plain, or page-locked by CUDA or ROCm."""
CUDA = (2, 13)
"""DLPack's numbers of memory that CUDA kernels reach: of one GPU, or managed."""


def as_array(array: Any, name: str) -> Any:
    """Return an array of NumPy or CuPy that shares the memory of `array`, without its autograd.

    array   of NumPy, CuPy, PyTorch, or another library with DLPack
    name    of the array, for the error
    raises  ConfigError if it is no array, lies in other memory, or has no dtype of NumPy
    """
    array = array.detach() if hasattr(array, "detach") else array
    if isinstance(array, np.ndarray):
        return array
    if not hasattr(array, "__dlpack_device__"):
        raise ConfigError(
            f"{name} must be an array of NumPy, CuPy or PyTorch, but it is a {type(array).__name__}.",
            "Pass the arrays themselves, for example list(model.parameters()).",
        )
    number = int(array.__dlpack_device__()[0])
    if number not in (*HOST, *CUDA):
        raise ConfigError(
            f"{name} must lie in the memory of the host or of a CUDA GPU, but it lies elsewhere.",
            "Copy it to the host first.",
        )
    try:
        if number in HOST:
            view = np.from_dlpack(array)
            # NumPy makes arrays of older versions of DLPack read-only, but not PyTorch's own.
            writeable = view if view.flags.writeable else np.asarray(array)
            return writeable if np.shares_memory(view, writeable) else view
        cupy = cupy_with_gpu()
        return array if isinstance(array, cupy.ndarray) else cupy.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{name} must have a dtype that NumPy has too, but {error}.", "Use float32 or float64."
        ) from None


def kind_of(array: Any) -> Kind:
    return "cpu" if isinstance(array, np.ndarray) else "cuda"
