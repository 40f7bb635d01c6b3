"""What the GPU engine hands to CuPy, shown by a CuPy that only remembers. With a GPU, tests/gpu shows the rest."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.arena import Arena
from mpitrain.errors import KernelError
from mpitrain.kernels.cuda import CudaEngine
from mpitrain.kernels.engines import kernels_for
from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda import product


class RememberingKernel:
    """Stands in for cupy.RawKernel."""

    def __init__(self):
        self.max_dynamic_shared_size_bytes = 0
        self.calls = []

    def __call__(self, grid, block, arguments, *, shared_mem):
        self.calls.append((grid, block, arguments, shared_mem))


class CompileError(Exception):
    """Stands in for cupy.cuda.compiler.CompileException."""


class RememberingCupy:
    """Stands in for the CuPy module."""

    def __init__(self, log: str = ""):
        self.modules, self.kernels = [], {}
        self.cuda = SimpleNamespace(Device=lambda: SimpleNamespace(compute_capability="90"),
                                    compiler=SimpleNamespace(CompileException=CompileError))
        self._log = log

    def RawModule(self, code, options):
        def compile():
            if self._log:
                raise CompileError(self._log)

        self.modules.append((code, options))
        return SimpleNamespace(compile=compile, get_function=lambda name: self.kernels.setdefault(name, RememberingKernel()))


def test_arrays_scalars_and_absent_arrays_reach_cupy_as_the_kernel_declares_them():
    cupy = RememberingCupy()
    a, c = np.ones((3, 4), np.float32), np.empty((3, 3), np.float32)
    product.gemm(Kernels(CudaEngine(cupy)), Arena(), a, a, c, transposed_b=True)
    (grid, block, arguments, shared), = cupy.kernels["gemm"].calls
    assert (grid, block, shared) == ((1, 1, 1), (64,), 0)
    assert [type(argument) for argument in arguments[:4]] == [np.int32, np.int32, np.int32, np.float32]
    assert arguments[4] is a and arguments[11] is c
    assert all(not isinstance(argument, (int, float)) and argument is not None for argument in arguments)
    bias = arguments[14]
    assert bias == 0 and bias.nbytes == 8, "a null pointer has eight bytes"


def test_a_source_is_compiled_once_for_each_set_of_macros():
    cupy = RememberingCupy()
    kernels = Kernels(CudaEngine(cupy))
    a, b = np.ones((3, 3), np.float32), np.ones((3, 3), np.float16)
    for _ in range(2):
        for x in (a, b):
            product.gemm(kernels, Arena(), x, x, np.empty_like(x))
    assert len(cupy.modules) == 2
    code, options = cupy.modules[0]
    assert '#include "' not in code, "CuPy's cache would not notice a changed header"
    assert {"--std=c++17", "-DElement=float", "-DTILE_M=32"} <= set(options)


def test_shared_memory_above_48_kib_is_asked_for_first():
    cupy = RememberingCupy()
    kernels = Kernels(CudaEngine(cupy))
    a = np.ones((256, 256), np.float16)
    product.gemm(kernels, Arena(), a, a, np.empty_like(a), plan=(product.TENSOR_TILES[0], 1))
    kernel = cupy.kernels["gemm_tensor"]
    assert kernel.calls[0][3] == kernel.max_dynamic_shared_size_bytes > 48 << 10


def test_a_failed_compilation_is_our_error_with_the_compilers_words():
    a = np.ones((3, 3), np.float32)
    with pytest.raises(KernelError, match=r"NVRTC cannot compile gemm\.cu for sm_90:\n.*gemm\.cu\(7\): error"):
        product.gemm(Kernels(CudaEngine(RememberingCupy("gemm.cu(7): error: x"))), Arena(), a, a, a.copy())


def test_a_kind_without_kernels_is_refused_with_those_that_have_some():
    with pytest.raises(KernelError, match=r"kind 'cpu'\.\n +There are some for cuda and cuda-sim"):
        kernels_for("cpu")
    assert kernels_for("cuda-sim") is kernels_for("cuda-sim")
