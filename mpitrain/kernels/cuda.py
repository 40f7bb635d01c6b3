"""The GPU as an engine: kernels compiled by NVRTC through CuPy, which caches them on disk, and launched on its stream."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpitrain.errors import KernelError
from mpitrain.kernels.arguments import Argument
from mpitrain.kernels.loader import Dims, Function
from mpitrain.kernels.source import Signature, Source

OPTIONS = ("--std=c++17",)
WITHOUT_ASKING = 48 << 10    # bytes of dynamic shared memory that any kernel may have
NULL = np.uintp(0)


class CudaEngine:
    """Compiles and launches kernels on the current device of a CuPy module."""

    def __init__(self, cupy: ModuleType):
        self._cupy = cupy
        self.capability = int(cupy.cuda.Device().compute_capability)
        self._modules: dict[tuple[Path, tuple], Any] = {}

    def load(self, source: Source, signature: Signature, defines: dict[str, str]) -> Function:
        """One kernel of a source; KernelError with NVRTC's words if it does not compile."""
        key = source.path, tuple(defines.items())
        if key not in self._modules:
            macros = tuple(f"-D{macro}={value}" for macro, value in defines.items())
            module = self._cupy.RawModule(code=source.text, options=(*OPTIONS, *macros))
            try:
                module.compile()
            except self._cupy.cuda.compiler.CompileException as error:
                raise KernelError(f"NVRTC cannot compile {source.path.name} for sm_{self.capability}:\n{error}",
                                  "CuPy and its CUDA headers must be of one version: reinstall mpitrain[cuda13] or [cuda12].",
                                  ) from None
            self._modules[key] = module
        kernel = self._modules[key].get_function(signature.name)

        def launch(grid: Dims, block: Dims, arguments: list[Any], shared: int) -> None:
            if shared > max(WITHOUT_ASKING, kernel.max_dynamic_shared_size_bytes):
                kernel.max_dynamic_shared_size_bytes = shared
            kernel(tuple(grid), tuple(block), [_plain(argument) for argument in arguments], shared_mem=shared)

        return launch


def _plain(argument: Any) -> Any:
    """What CuPy passes on: an array's pointer, a scalar's bytes; a null pointer for an absent array."""
    if not isinstance(argument, Argument):
        return argument
    return NULL if argument.array is None else argument.array
