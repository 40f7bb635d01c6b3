"""The GPU engine: NVRTC compiles kernels, a folder caches them, CuPy loads and launches them."""

import ctypes
import hashlib
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpitrain.errors import ConfigError, KernelError
from mpitrain.kernels.loader import (
    BOX_COLUMNS,
    Dims,
    Function,
    Multiprocessor,
    TensorMap,
    map_pitches,
)
from mpitrain.kernels.source import Signature, SourceFile
from mpitrain.machine.compiling import cache_of, compiled_once

# Any kernel may use these bytes of shared memory, static and dynamic together, without a request.
WITHOUT_ASKING = 48 << 10
CODES = {
    "float": "f",
    "double": "d",
    "signed char": "b",
    "unsigned char": "B",
    "unsigned short": "H",
    "int": "i",
    "unsigned": "I",
    "long long": "q",
    "unsigned long long": "Q",
    "TensorMap": "128s",
}
"""The struct format of a number, or of a structure by value, by its C++ type."""

LIMITS = (
    "MaxThreadsPerMultiProcessor",
    "MaxRegistersPerMultiprocessor",
    "MaxSharedMemoryPerMultiprocessor",
    "ReservedSharedMemoryPerBlock",
    "MaxBlocksPerMultiprocessor",
)
"""The driver's names for the fields of `Multiprocessor`."""

LIBRARY_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
"""cudaDataType by dtype."""

MAP_TYPES = {"float16": 6, "bfloat16": 9}
"""CUtensorMapDataType by dtype."""
SWIZZLE_128B, L2_256B = 3, 3  # CUtensorMapSwizzle, CUtensorMapL2promotion
MAP_BYTES, MAP_ALIGNMENT = 128, 64
MOST_MAPS = 4096  # so many places in memory are remembered


class _Packed(threading.local):
    """Memory for the arguments of a launch, of each thread its own.

    both  the memory, and the address of the pointers into it
    """

    def __init__(self, layout: Sequence[str]):
        # Native mode: values are aligned as in a C structure.
        memory = (ctypes.c_ubyte * max(1, struct.calcsize("".join(layout))))()
        first = ctypes.addressof(memory)
        self._pointers = (ctypes.c_void_p * max(1, len(layout)))(
            *(
                first + struct.calcsize("".join(layout[: place + 1])) - struct.calcsize(code)
                for place, code in enumerate(layout)
            )
        )
        self.both = memory, ctypes.addressof(self._pointers)


class Launch:
    """A kernel of a module, launched by a direct call of the driver.

    CuPy's own launch inspects each argument anew, and takes twice as long. Here all arguments are
    packed into one block of memory. The driver gets pointers into this block, which are made once.
    """

    def __init__(
        self, cupy: ModuleType, kernel: Any, signature: Signature, defines: Mapping[str, str]
    ):
        self._kernel, self._function = kernel, kernel.kernel.ptr
        self._launch, self._stream = cupy.cuda.driver.launchKernel, cupy.cuda.get_current_stream
        layout = tuple(
            "Q" if parameter.is_pointer else CODES[defines.get(parameter.type, parameter.type)]
            for parameter in signature.parameters
        )
        self._pack, self._packed = struct.Struct("".join(layout)).pack_into, _Packed(layout)
        self._scalars = tuple(not parameter.is_pointer for parameter in signature.parameters)
        self._maps = layout.count(CODES["TensorMap"])  # they come first
        self._allowed, self._one_asks = WITHOUT_ASKING - kernel.shared_size_bytes, threading.Lock()

    def __call__(self, grid: Dims, block: Dims, arguments: Sequence[Any], shared: int) -> None:
        memory, places = self._packed.both
        if self._maps:
            maps, rest = arguments[: self._maps], arguments[self._maps :]
            arguments = [*(each.encoded for each in maps), *rest]
        self._pack(
            memory,
            0,
            *[
                value if is_scalar else 0 if value is None else value.data.ptr
                for value, is_scalar in zip(arguments, self._scalars, strict=True)
            ],
        )
        if shared > self._allowed:
            self._ask(shared)
        self._launch(
            self._function,
            *(*grid, 1, 1)[:3],
            *(*block, 1, 1)[:3],
            shared,
            self._stream().ptr,
            places,
            0,
        )

    def _ask(self, shared: int) -> None:
        """Raise the function's limit of dynamic shared memory, which another thread may raise too."""
        with self._one_asks:
            if shared > self._allowed:
                self._kernel.max_dynamic_shared_size_bytes = self._allowed = shared

    def used(self) -> dict[str, int]:
        """Return the registers and the bytes of local memory of a thread; local memory holds
        spilled registers.
        """
        return {"registers": self._kernel.num_regs, "local_bytes": self._kernel.local_size_bytes}


class CudaEngine:
    """An engine that compiles and launches kernels on the current device of a CuPy module."""

    takes_plain = True

    @property
    def has_wgmma(self) -> bool:
        """True on Hopper alone: the instructions are of sm_90a, not of what came later."""
        return self.capability == 90

    def __init__(self, cupy: ModuleType, folder: Path | None = None):
        """Read the device's properties, and load NVRTC.

        folder  of compiled kernels; None: this user's
        """
        self._cupy = cupy
        device = cupy.cuda.Device()
        self.capability = int(device.compute_capability)
        self.multiprocessors = int(device.attributes["MultiProcessorCount"])
        self.multiprocessor = Multiprocessor(*(int(device.attributes[name]) for name in LIMITS))
        self._compiler = Compiler(cupy, self.capability, folder or cache_of("cuda"))
        self._modules: dict[tuple, Any] = {}
        self._launches: dict[tuple, Launch] = {}
        self._maps: dict[tuple, bytes] = {}

    @property
    def name(self) -> str:
        runtime = self._cupy.cuda.runtime
        return runtime.getDeviceProperties(runtime.getDevice())["name"].decode()

    def prepare(self, source: SourceFile, defines: dict[str, str], waits: bool) -> None:
        self._compiler.compile(source, defines, waits)

    def load(self, source: SourceFile, signature: Signature, defines: dict[str, str]) -> Function:
        """Return one kernel of a source, the same `Launch` for all sizes of blocks and all threads.

        raises  KernelError with NVRTC's messages if it does not compile
        """
        key = source.path, *defines.items()
        if (launch := self._launches.get((signature.name, key))) is not None:
            return launch
        if key not in self._modules:
            self._modules[key] = self._cupy.RawModule(
                path=str(self._compiler.compile(source, defines))
            )
        kernel = self._modules[key].get_function(signature.name)
        return self._launches.setdefault(
            (signature.name, key), Launch(self._cupy, kernel, signature, defines)
        )

    def tensor_map(self, array: Any, box_rows: int) -> TensorMap:
        """Return the map of an array, encoded once for each place and shape in memory.

        raises  KernelError if the driver refuses it
        """
        key = array.data.ptr, array.shape, array.strides, array.dtype, box_rows
        if (encoded := self._maps.get(key)) is None:
            if len(self._maps) >= MOST_MAPS:
                self._maps.clear()
            kind, pitches = MAP_TYPES[array.dtype.name], map_pitches(array)
            encoded = self._maps[key] = encoded_map(
                kind, array.data.ptr, array.shape, pitches, box_rows
            )
        return TensorMap(array, box_rows, encoded)

    def multiply(
        self, a: Any, b: Any, c: Any, transposed_a: bool, transposed_b: bool, accumulate: bool
    ) -> None:
        """Compute the product by cuBLAS.

        cuBLAS stores matrices by columns, so it computes the transposed: c^T = op(b)^T op(a)^T.
        raises  ConfigError if CuPy finds no cuBLAS
        """
        try:
            cublas, handle = self._cupy.cuda.cublas, self._cupy.cuda.get_cublas_handle()
        except ImportError as error:
            # CuPy loads the library at first use, and its wheels do not contain it.
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"Products by the library need cuBLAS, but CuPy cannot load it: {reason}",
                "Install it: pip install 'mpitrain[cuda13]', or [cuda12]; or multiply by our kernels.",
            ) from None
        is_double = a.dtype.name == "float64"
        compute = cublas.CUBLAS_COMPUTE_64F if is_double else cublas.CUBLAS_COMPUTE_32F
        alpha, beta = (
            np.array(factor, np.float64 if is_double else np.float32) for factor in (1, accumulate)
        )
        # Other code may have allowed TF32 on this handle; products here must not use it.
        cublas.setMathMode(handle, cublas.CUBLAS_DEFAULT_MATH)
        cublas.gemmEx(
            handle,
            int(transposed_b),
            int(transposed_a),
            c.shape[1],
            c.shape[0],
            a.shape[0 if transposed_a else 1],
            alpha.ctypes.data,
            *_matrix(b),
            *_matrix(a),
            beta.ctypes.data,
            *_matrix(c),
            compute,
            cublas.CUBLAS_GEMM_DEFAULT,
        )


def encoded_map(
    kind: int, address: int, shape: tuple[int, ...], pitches: tuple[int, ...], box_rows: int
) -> bytes:
    """Return an array as the driver encodes it for the copy engine, swizzled by 128 bytes.

    kind     CUtensorMapDataType
    pitches  of `map_pitches`
    raises  KernelError if the driver refuses it
    """
    memory = (ctypes.c_ubyte * (MAP_BYTES + MAP_ALIGNMENT))()
    place = -(-ctypes.addressof(memory) // MAP_ALIGNMENT) * MAP_ALIGNMENT
    dims = len(shape)
    box = BOX_COLUMNS, box_rows, 1
    interleave, swizzle, promotion, fill = 0, SWIZZLE_128B, L2_256B, 0
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        kind,
        dims,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * dims)(*reversed(shape)),
        (ctypes.c_uint64 * (dims - 1))(*pitches),
        (ctypes.c_uint32 * dims)(*box[:dims]),
        (ctypes.c_uint32 * dims)(*[1] * dims),
        interleave,
        swizzle,
        promotion,
        fill,
    )
    if status:
        raise KernelError(
            f"The driver makes no map of an array {shape} at {address:#x} with rows {pitches[0]} bytes apart: error {status}.",
            "Rows must begin at multiples of 16 bytes; else use device.tensor_cores=mma.",
        )
    return ctypes.string_at(place, MAP_BYTES)


def _matrix(array: Any) -> tuple[int, int, int]:
    """Return the address, type and row stride (in elements) of a matrix.

    A single row's stride may be any number, so the result is at least the number of columns.
    """
    return (
        array.data.ptr,
        LIBRARY_TYPES[array.dtype.name],
        max(array.shape[1], array.strides[0] // array.itemsize),
    )


OPTIONS = ("--std=c++17", "-default-device")
"""The options for every source. Subnormal numbers are not flushed to 0: host and GPU agree on them.

Without -default-device, NVRTC up to 13.0 takes a lambda with a parameter `auto` for a host
function.
"""


@contextmanager
def own_locale() -> Iterator[None]:
    """Restore this thread's locale afterwards.

    NVRTC 12.2 leaves the locale "C" behind, in which Python opens files as ASCII.
    """
    use = ctypes.CDLL(None).uselocale
    use.restype, use.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = use(None)
    try:
        yield
    finally:
        use(before)


def architecture(capability: int, known: Sequence[int]) -> str:
    """Return the architecture that NVRTC compiles for.

    From 9.0 on, this is the variant with features that only this chip has (sm_90a).
    capability  of the device, times ten
    known       capabilities that this NVRTC knows; for a newer device, the driver translates the
                newest one's PTX
    """
    if capability > max(known):
        return f"compute_{max(known)}"
    return f"sm_{capability}{'a' * (capability >= 90)}"


class Compiler:
    """A compiler of sources for one device.

    cupy        the module
    capability  of the device, times ten
    folder      of the compiled files
    """

    def __init__(self, cupy: ModuleType, capability: int, folder: Path):
        """Load NVRTC.

        raises  ConfigError without NVRTC, or if the driver is too old for its code
        """
        self._cupy, self._folder = cupy, folder
        try:
            self._version = cupy.cuda.nvrtc.getVersion()
        except RuntimeError as error:
            # CuPy loads the library at first use, and its wheels do not contain it.
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"Kernels are compiled by NVRTC, but CuPy cannot load it: {reason}",
                "Install it: pip install 'mpitrain[cuda13]', or [cuda12].",
            ) from None
        driver = cupy.cuda.runtime.driverGetVersion()
        if self._version[0] > driver // 1000:
            raise ConfigError(
                "NVRTC {}.{} compiles for newer drivers than the one here, which is of CUDA {}.{}.".format(
                    *self._version, driver // 1000, driver % 1000 // 10
                ),
                "CuPy takes the newest NVRTC that is installed: uninstall nvidia-cuda-nvrtc, or update the driver.",
            )
        self.architecture = architecture(capability, cupy.cuda.nvrtc.getSupportedArchs())
        """The architecture, as in NVRTC's option."""

    def compile(self, source: SourceFile, defines: Mapping[str, str], waits: bool = True) -> Path:
        """Return the file of the machine code, or of PTX for a device newer than NVRTC.

        waits   for another rank that compiles it; if not, the file may not exist yet
        raises  KernelError with NVRTC's messages
        """
        macros = tuple(f"-D{macro}={value}" for macro, value in defines.items())
        options = (f"-arch={self.architecture}", *OPTIONS, *macros)
        key = hashlib.sha256(repr((source.text, options, self._version)).encode()).hexdigest()[:32]
        is_code = self.architecture.startswith("sm_")
        path = self._folder / f"{source.path.stem}-{key}.{'cubin' if is_code else 'ptx'}"

        def compile(part: Path) -> None:
            # These options name the folders of CUDA's and CuPy's headers. The key omits them,
            # because they differ between machines.
            headers = tuple(self._cupy._core.core.assemble_cupy_compiler_options(()))
            folders = tuple(option for option in headers if option.startswith("-I"))
            part.write_bytes(self._compiled(source, options + folders, is_code))

        return compiled_once(path, source.path.name, compile, waits)

    def _compiled(self, source: SourceFile, options: tuple[str, ...], is_code: bool) -> bytes:
        nvrtc = self._cupy.cuda.nvrtc
        program = nvrtc.createProgram(source.text, source.path.name, (), ())
        try:
            with own_locale():
                nvrtc.compileProgram(program, options)
            # CuPy drops the last byte, as the end of a text. For machine code, the 0 restores it.
            return nvrtc.getCUBIN(program) + b"\0" if is_code else nvrtc.getPTX(program)
        except nvrtc.NVRTCError:
            raise KernelError(
                f"NVRTC cannot compile {source.path.name} for {self.architecture}:\n{nvrtc.getProgramLog(program)}",
                "CuPy and its CUDA headers must be of one version: reinstall mpitrain[cuda13] or [cuda12].",
            ) from None
        finally:
            nvrtc.destroyProgram(program)
