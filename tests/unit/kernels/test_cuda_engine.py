"""What the GPU engine hands to CuPy, shown by a CuPy that only remembers. With a GPU, tests/gpu shows the rest."""

import ctypes
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from mpitrain.errors import ConfigError, KernelError
from mpitrain.kernels.cuda import CudaEngine
from mpitrain.kernels.loader import Kernels
from mpitrain.machine.arena import Arena
from mpitrain.ops.cuda import product
from mpitrain.ops.cuda.tiles import TENSOR_TILES, TILES, Measured, Table, Tiling
from tests.cases.numbers import assert_close, numbers, stored, values


class RememberingKernel:
    """Stands in for cupy.RawKernel."""

    def __init__(self):
        self.max_dynamic_shared_size_bytes = 0
        self.calls = []

    def __call__(self, grid, block, arguments, *, shared_mem):
        self.calls.append((grid, block, arguments, shared_mem))


class CompileError(Exception):
    """Stands in for cupy.cuda.compiler.CompileException."""


class ColumnMajor:
    """Stands in for cupy.cuda.cublas: NumPy behind the interface of cuBLAS, to which matrices are columns one after another."""

    CUBLAS_DEFAULT_MATH, CUBLAS_GEMM_DEFAULT, CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F = 0, -1, 68, 70
    TYPES = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}
    SUMS = {68: ctypes.c_float, 70: ctypes.c_double}

    def __init__(self):
        self.modes = []

    def setMathMode(self, handle, mode):
        self.modes.append((handle, mode))

    def matrix(self, address, kind, rows, columns, pitch):
        assert pitch >= max(1, rows), "cuBLAS refuses a leading dim shorter than a column"
        dtype = np.dtype(self.TYPES[kind])
        extent = ((columns - 1) * pitch + rows) * dtype.itemsize
        memory = np.frombuffer((ctypes.c_ubyte * extent).from_address(address), np.uint8)
        return np.ndarray((rows, columns), dtype, memory, strides=(dtype.itemsize, pitch * dtype.itemsize))

    def gemmEx(self, handle, transa, transb, m, n, k, alpha, a, a_kind, lda, b, b_kind, ldb, beta, c, c_kind, ldc, compute,
               algorithm):
        assert (handle, algorithm) == ("handle", self.CUBLAS_GEMM_DEFAULT)
        alpha, beta = (self.SUMS[compute].from_address(factor).value for factor in (alpha, beta))
        left = self.matrix(a, a_kind, *((k, m) if transa else (m, k)), lda).astype(np.float64)
        right = self.matrix(b, b_kind, *((n, k) if transb else (k, n)), ldb).astype(np.float64)
        result = self.matrix(c, c_kind, m, n, ldc)
        product = alpha * (left.T if transa else left) @ (right.T if transb else right)
        result[...] = product if beta == 0 else product + beta * result.astype(np.float64)


class RememberingCupy:
    """Stands in for the CuPy module."""

    def __init__(self, log: str = ""):
        self.modules, self.kernels = [], {}
        self.cuda = SimpleNamespace(Device=lambda: SimpleNamespace(compute_capability="90",
                                                                   attributes={"MultiProcessorCount": 132}),
                                    compiler=SimpleNamespace(CompileException=CompileError),
                                    cublas=ColumnMajor(), get_cublas_handle=lambda: "handle")
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


def test_a_measured_tile_is_the_one_that_is_launched():
    cupy, a = RememberingCupy(), np.ones((100, 100), np.float32)
    table = Table([Measured("float32", "NT", 128, 128, 128, Tiling(TILES[1], 1))])
    multiply = partial(product.gemm, Kernels(CudaEngine(cupy)), Arena(), a, a, np.empty_like(a), table=table)
    for transposed_b, tile in ((True, TILES[1]), (False, TILES[2])):
        multiply(transposed_b=transposed_b)
        assert {f"-D{macro}={value}" for macro, value in tile._asdict().items()} <= set(cupy.modules[-1][1])


def test_shared_memory_above_48_kib_is_asked_for_first():
    cupy = RememberingCupy()
    kernels = Kernels(CudaEngine(cupy))
    a = np.ones((256, 256), np.float16)
    product.gemm(kernels, Arena(), a, a, np.empty_like(a), tiling=Tiling(TENSOR_TILES[0], 1))
    kernel = cupy.kernels["gemm_tensor"]
    assert kernel.calls[0][3] == kernel.max_dynamic_shared_size_bytes > 48 << 10


def test_a_failed_compilation_is_our_error_with_the_compilers_words():
    a = np.ones((3, 3), np.float32)
    with pytest.raises(KernelError, match=r"NVRTC cannot compile gemm\.cu for sm_90:\n.*gemm\.cu\(7\): error"):
        product.gemm(Kernels(CudaEngine(RememberingCupy("gemm.cu(7): error: x"))), Arena(), a, a, a.copy())


class OnDevice(np.ndarray):
    """A NumPy array whose `data.ptr` is its address, as CuPy's is."""

    data = property(lambda self: SimpleNamespace(ptr=self.ctypes.data))


@pytest.mark.parametrize(("ta", "tb"), [(False, True), (False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("dtype", "result"), [("float32", "float32"), ("float64", "float64"), ("float16", "float32"),
                                               ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_the_library_is_asked_for_the_product_of_rows(ta, tb, dtype, result):
    cupy, (m, n, k) = RememberingCupy(), (3, 5, 4)
    engine = CudaEngine(cupy)
    for accumulate, gap in ((False, 0), (True, 3)):
        a, b, c = (stored(numbers(seed, rows, columns + gap), kind)[:, :columns].view(OnDevice) for seed, rows, columns, kind in (
            (1, *((k, m) if ta else (m, k)), dtype), (2, *((n, k) if tb else (k, n)), dtype), (3, m, n, result)))
        truth = (values(a).T if ta else values(a)) @ (values(b).T if tb else values(b)) + accumulate * values(c)
        engine.multiply(a, b, c, ta, tb, accumulate)
        assert_close(c, truth, result)
    assert cupy.cuda.cublas.modes == [("handle", ColumnMajor.CUBLAS_DEFAULT_MATH)] * 2, "TF32 is never on"


def test_what_the_library_cannot_do_is_refused():
    kernels, a = Kernels(CudaEngine(RememberingCupy())), np.ones((3, 3), np.float32)
    with pytest.raises(KernelError, match="makes one product at a time, not 2"):
        product.library(kernels, Arena(), *[np.ones((2, 3, 3), np.float32)] * 3)
    with pytest.raises(KernelError, match="Only of an operand stored transposed can the rows be summed"):
        product.library(kernels, Arena(), a, a, a.copy(), row_sums=np.empty(3, np.float32))
    with pytest.raises(KernelError, match="does not fit into"):
        product.library(kernels, Arena(), a, a, np.ones((3, 2), np.float32))


def test_where_cupy_finds_no_cublas_it_is_said_how_to_get_it():
    """CuPy's wheels have none: it is looked for when the module is first asked for, which then is an ImportError."""
    class WithoutCublas(SimpleNamespace):
        @property
        def cublas(self):
            raise ImportError('Failure finding "libcublasLt.so.13": No such file\n\nmore lines')

    cupy, a = RememberingCupy(), np.ones((3, 3), np.float32).view(OnDevice)
    cupy.cuda = WithoutCublas(Device=cupy.cuda.Device)
    with pytest.raises(ConfigError, match=r"need cuBLAS, but .* it: Failure .* No such file\n +Install it: .*cuda13"):
        CudaEngine(cupy).multiply(a, a, a.copy(), False, False, False)


def test_a_single_row_may_have_any_stride():
    a, b, c = (np.ones((8, 4), np.float32)[::9].view(OnDevice), np.ones((4, 3), np.float32).view(OnDevice),
               np.zeros((1, 3), np.float32).view(OnDevice))
    a = np.lib.stride_tricks.as_strided(a, (1, 4), (0, 4), subok=True)
    CudaEngine(RememberingCupy()).multiply(a, b, c, False, False, False)
    assert c.tolist() == [[4, 4, 4]]


