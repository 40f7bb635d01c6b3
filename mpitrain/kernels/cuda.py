"""The GPU as an engine: kernels compiled by NVRTC, kept on disk, loaded by CuPy and launched on its stream."""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.kernels.cache import cache_of
from mpitrain.kernels.loader import Dims, Function
from mpitrain.kernels.multiprocessor import Multiprocessor
from mpitrain.kernels.nvrtc import Compiler
from mpitrain.kernels.source import Signature, SourceFile

WITHOUT_ASKING = 48 << 10  # bytes of dynamic shared memory that any kernel may have
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
}
"""How struct packs a number, by its C++ type."""

LIMITS = (
    "MaxThreadsPerMultiProcessor",
    "MaxRegistersPerMultiprocessor",
    "MaxSharedMemoryPerMultiprocessor",
    "ReservedSharedMemoryPerBlock",
    "MaxBlocksPerMultiprocessor",
)
"""The driver's names for what `Multiprocessor` lists."""

LIBRARY_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
"""cudaDataType by dtype."""


class Launch:
    """A kernel of a module, launched by the driver itself: CuPy's own way looks at each argument anew, and costs as much again.

    All arguments are packed into one piece of memory, to whose parts the driver is given pointers, made once.
    """

    def __init__(
        self, cupy: ModuleType, kernel: Any, signature: Signature, defines: Mapping[str, str]
    ):
        self._kernel, self._function = kernel, kernel.kernel.ptr
        self._launch, self._stream = cupy.cuda.driver.launchKernel, cupy.cuda.get_current_stream
        layout = "".join(
            "Q" if each.is_pointer else CODES[defines.get(each.type, each.type)]
            for each in signature.parameters
        )
        packed = struct.Struct(layout)  # aligned as C aligns the members of a structure
        self._pack, self._scalars = (
            packed.pack_into,
            tuple(not each.is_pointer for each in signature.parameters),
        )
        self._memory = (ctypes.c_ubyte * max(1, packed.size))()
        starts = (
            struct.calcsize(layout[: place + 1]) - struct.calcsize(code)
            for place, code in enumerate(layout)
        )
        first = ctypes.addressof(self._memory)
        self._pointers = (ctypes.c_void_p * max(1, len(layout)))(
            *(first + start for start in starts)
        )
        self._places, self._allowed = ctypes.addressof(self._pointers), WITHOUT_ASKING

    def __call__(self, grid: Dims, block: Dims, arguments: Sequence[Any], shared: int) -> None:
        self._pack(
            self._memory,
            0,
            *[
                value if is_scalar else 0 if value is None else value.data.ptr
                for value, is_scalar in zip(arguments, self._scalars, strict=True)
            ],
        )
        if shared > self._allowed:
            self._kernel.max_dynamic_shared_size_bytes = self._allowed = shared
        self._launch(
            self._function,
            *(*grid, 1, 1)[:3],
            *(*block, 1, 1)[:3],
            shared,
            self._stream().ptr,
            self._places,
            0,
        )

    def used(self) -> dict[str, int]:
        """What a thread takes; bytes of local memory are spilled registers."""
        return {"registers": self._kernel.num_regs, "local_bytes": self._kernel.local_size_bytes}


class CudaEngine:
    """Compiles and launches kernels on the current device of a CuPy module."""

    takes_plain = True

    def __init__(self, cupy: ModuleType, folder: Path | None = None):
        """folder: of compiled kernels; None: this user's."""
        self._cupy = cupy
        device = cupy.cuda.Device()
        self.capability = int(device.compute_capability)
        self.multiprocessors = int(device.attributes["MultiProcessorCount"])
        self.multiprocessor = Multiprocessor(*(int(device.attributes[name]) for name in LIMITS))
        self._compiler = Compiler(cupy, self.capability, folder or cache_of("cuda"))
        self._modules: dict[tuple[Path, tuple], Any] = {}

    @property
    def name(self) -> str:
        """The GPU's name."""
        runtime = self._cupy.cuda.runtime
        return runtime.getDeviceProperties(runtime.getDevice())["name"].decode()

    def load(self, source: SourceFile, signature: Signature, defines: dict[str, str]) -> Function:
        """One kernel of a source; KernelError with NVRTC's words if it does not compile."""
        key = source.path, tuple(defines.items())
        if key not in self._modules:
            self._modules[key] = self._cupy.RawModule(
                path=str(self._compiler.compile(source, defines))
            )
        return Launch(
            self._cupy, self._modules[key].get_function(signature.name), signature, defines
        )

    def multiply(
        self, a: Any, b: Any, c: Any, transposed_a: bool, transposed_b: bool, accumulate: bool
    ) -> None:
        """By cuBLAS. To it our rows are columns, so that it computes the transposed: c^T = op(b)^T op(a)^T.

        raises  ConfigError where CuPy finds no cuBLAS
        """
        try:
            cublas, handle = self._cupy.cuda.cublas, self._cupy.cuda.get_cublas_handle()
        except (
            ImportError
        ) as error:  # CuPy loads it when it is first asked for, and its wheels come without
            said = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"Products by the library need cuBLAS, but CuPy cannot load it: {said}",
                "Install it: pip install 'mpitrain[cuda13]', or [cuda12]; or multiply by our kernels.",
            ) from None
        is_double = a.dtype.name == "float64"
        compute = cublas.CUBLAS_COMPUTE_64F if is_double else cublas.CUBLAS_COMPUTE_32F
        alpha, beta = (
            np.array(factor, np.float64 if is_double else np.float32) for factor in (1, accumulate)
        )
        cublas.setMathMode(
            handle, cublas.CUBLAS_DEFAULT_MATH
        )  # no TF32, whatever others have asked of this handle
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


def _matrix(array: Any) -> tuple[int, int, int]:
    """Address, type and elements from row to row, which in a single row may be anything."""
    return (
        array.data.ptr,
        LIBRARY_TYPES[array.dtype.name],
        max(array.shape[1], array.strides[0] // array.itemsize),
    )
