"""The GPU as an engine: kernels compiled by NVRTC, kept on disk, loaded by CuPy and launched on its stream."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.kernels.arguments import Argument
from mpitrain.kernels.cache import cache_of
from mpitrain.kernels.loader import Dims, Function
from mpitrain.kernels.nvrtc import Compiler
from mpitrain.kernels.source import Signature, SourceFile

WITHOUT_ASKING = 48 << 10    # bytes of dynamic shared memory that any kernel may have
NULL = np.uintp(0)
LIBRARY_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
"""cudaDataType by dtype."""


class CudaEngine:
    """Compiles and launches kernels on the current device of a CuPy module."""

    def __init__(self, cupy: ModuleType, folder: Path | None = None):
        """folder: of compiled kernels; None: this user's."""
        self._cupy = cupy
        self.capability = int(cupy.cuda.Device().compute_capability)
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
            self._modules[key] = self._cupy.RawModule(path=str(self._compiler.compile(source, defines)))
        kernel = self._modules[key].get_function(signature.name)

        def launch(grid: Dims, block: Dims, arguments: list[Any], shared: int) -> None:
            if shared > max(WITHOUT_ASKING, kernel.max_dynamic_shared_size_bytes):
                kernel.max_dynamic_shared_size_bytes = shared
            kernel(tuple(grid), tuple(block), [_plain(argument) for argument in arguments], shared_mem=shared)

        def used() -> dict[str, int]:
            """What a thread takes; bytes of local memory are spilled registers."""
            return {"registers": kernel.num_regs, "local_bytes": kernel.local_size_bytes}

        launch.used = used  # type: ignore[attr-defined]
        return launch

    def multiply(self, a: Any, b: Any, c: Any, transposed_a: bool, transposed_b: bool, accumulate: bool) -> None:
        """By cuBLAS. To it our rows are columns, so that it computes the transposed: c^T = op(b)^T op(a)^T.

        raises  ConfigError where CuPy finds no cuBLAS
        """
        try:
            cublas, handle = self._cupy.cuda.cublas, self._cupy.cuda.get_cublas_handle()
        except ImportError as error:    # CuPy loads it when it is first asked for, and its wheels come without
            said = str(error).strip().partition("\n")[0]
            raise ConfigError(f"Products by the library need cuBLAS, but CuPy cannot load it: {said}",
                              "Install it: pip install 'mpitrain[cuda13]', or [cuda12]; or multiply by our kernels.") from None
        is_double = a.dtype.name == "float64"
        compute = cublas.CUBLAS_COMPUTE_64F if is_double else cublas.CUBLAS_COMPUTE_32F
        alpha, beta = (np.array(factor, np.float64 if is_double else np.float32) for factor in (1, accumulate))
        cublas.setMathMode(handle, cublas.CUBLAS_DEFAULT_MATH)    # no TF32, whatever others have asked of this handle
        cublas.gemmEx(handle, int(transposed_b), int(transposed_a), c.shape[1], c.shape[0], a.shape[0 if transposed_a else 1],
                      alpha.ctypes.data, *_matrix(b), *_matrix(a), beta.ctypes.data, *_matrix(c),
                      compute, cublas.CUBLAS_GEMM_DEFAULT)


def _matrix(array: Any) -> tuple[int, int, int]:
    """Address, type and elements from row to row, which in a single row may be anything."""
    return array.data.ptr, LIBRARY_TYPES[array.dtype.name], max(array.shape[1], array.strides[0] // array.itemsize)


def _plain(argument: Any) -> Any:
    """What CuPy passes on: an array's pointer, a scalar's bytes; a null pointer for an absent array."""
    if not isinstance(argument, Argument):
        return argument
    return NULL if argument.array is None else argument.array
