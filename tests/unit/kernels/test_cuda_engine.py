"""What the GPU engine hands to CuPy, shown by a CuPy that only remembers. With a GPU, tests/gpu shows the rest."""

import ctypes
import json
import os
from functools import partial
from pathlib import Path
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
from tests.unit.kernels.nvrtc import Module


class RememberingKernel:
    """Stands in for cupy.RawKernel."""

    def __init__(self):
        self.max_dynamic_shared_size_bytes = 0
        self.calls = []

    def __call__(self, grid, block, arguments, *, shared_mem):
        self.calls.append((grid, block, arguments, shared_mem))


class RememberingCompiler:
    """Stands in for cupy.cuda.nvrtc: what it makes of a source is the source and the options."""

    class NVRTCError(Exception):
        pass

    def __init__(self, log: str):
        self._log = log

    def getVersion(self):
        return 13, 0

    def getSupportedArchs(self):
        return [75, 80, 90, 100]

    def createProgram(self, text, name, headers, include_names):
        return [text]

    def compileProgram(self, program, options):
        program.append(options)
        if self._log:
            raise self.NVRTCError

    def getCUBIN(self, program):
        return json.dumps(program).encode()

    getPTX = getCUBIN

    def getProgramLog(self, program):
        return self._log

    def destroyProgram(self, program):
        pass


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

    def __init__(self, log: str = "", capability: str = "90"):
        self.modules, self.kernels = [], {}
        self.cuda = SimpleNamespace(Device=lambda: SimpleNamespace(compute_capability=capability),
                                    nvrtc=RememberingCompiler(log), cublas=ColumnMajor(), get_cublas_handle=lambda: "handle")
        self._core = SimpleNamespace(core=SimpleNamespace(
            assemble_cupy_compiler_options=lambda options: ("--std=c++17", "-I/of/cuda", *options)))

    def RawModule(self, path):
        self.modules.append(json.loads(Path(path).read_text()))
        return SimpleNamespace(get_function=lambda name: self.kernels.setdefault(name, RememberingKernel()))


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
    assert {"--std=c++17", "-ftz=true", "-DElement=float", "-DTILE_M=32", "-I/of/cuda"} <= set(options)


@pytest.mark.parametrize(("capability", "is_compiled_for"), [
    ("75", "sm_75"), ("89", "sm_89"), ("90", "sm_90a"), ("100", "sm_100a"), ("121", "compute_100")])
def test_a_source_is_compiled_for_the_chip_itself_or_for_the_newest_that_nvrtc_knows(capability, is_compiled_for):
    cupy, a = RememberingCupy(capability=capability), np.ones((3, 3), np.float32)
    product.gemm(Kernels(CudaEngine(cupy)), Arena(), a, a, a.copy())
    assert cupy.modules[0][1][0] == f"-arch={is_compiled_for}"


def test_what_was_compiled_is_found_by_the_next_process_and_half_a_file_never(tmp_path):
    a = np.ones((3, 3), np.float32)
    for cupy in (RememberingCupy(), RememberingCupy("nothing may be compiled again")):
        product.gemm(Kernels(CudaEngine(cupy, tmp_path)), Arena(), a, a, a.copy())
    path, = tmp_path.iterdir()
    assert path.name.startswith("gemm-") and path.suffix == ".cubin" and os.access(path, os.R_OK)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What stands in for machine code must not be found by others."""
    monkeypatch.setattr("mpitrain.kernels.cuda.cache_of", lambda what: tmp_path)


WGMMA = """extern "C" __global__ void waits(float* x) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    *x = 1;
}
"""


def test_instructions_of_one_chip_alone_are_compiled_and_loaded(tmp_path):
    """By the real NVRTC, for sm_90a; a chip without them is told so."""
    (tmp_path / "waits.cu").write_text(WGMMA)
    (tmp_path / "compiled").mkdir()
    loaded = []
    for capability in ("90", "80"):
        cupy = RememberingCupy(capability=capability)
        cupy.cuda.nvrtc = Module()
        cupy._core.core.assemble_cupy_compiler_options = lambda options, nvrtc=cupy.cuda.nvrtc: (nvrtc.includes(),)
        cupy.RawModule = lambda path: loaded.append(path) or SimpleNamespace(get_function=lambda name: RememberingKernel())
        kernels = Kernels(CudaEngine(cupy, tmp_path / "compiled"), tmp_path)
        if capability == "90":
            kernels.launch("waits", (1,), (1,), (np.zeros(1, np.float32),))
        else:
            with pytest.raises(KernelError, match=r"cannot compile waits\.cu for sm_80:\n(.|\n)*wgmma"):
                kernels.launch("waits", (1,), (1,), (np.zeros(1, np.float32),))
    assert Path(loaded[0]).read_bytes()[:4] == b"\x7fELF" and len(loaded) == 1


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
    with pytest.raises(KernelError, match=r"NVRTC cannot compile gemm\.cu for sm_90a:\n.*gemm\.cu\(7\): error"):
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


