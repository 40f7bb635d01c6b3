"""What the GPU engine hands to CuPy, shown by a CuPy that only remembers. With a GPU, tests/gpu shows the rest."""

import ctypes
import json
import os
import struct
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from mpitrain.errors import ConfigError, KernelError
from mpitrain.kernels.cuda import CudaEngine
from mpitrain.kernels.loader import H100, Kernels
from mpitrain.kernels.source import package_sources
from mpitrain.machine.backend import Arena
from mpitrain.ops.cuda import product
from mpitrain.ops.cuda.tiles import TENSOR_TILES, TILES, FastestTile, MeasuredTiles, Tiling
from mpitrain.ops.device import cuda_ops
from mpitrain.transport.threads import run_ranks
from tests.cases.numbers import assert_close, numbers, stored, values
from tests.fakes.cupy import ATTRIBUTES
from tests.unit.kernels.nvrtc import NEWEST, Compiler, Module, usages

LIBC = ctypes.CDLL(None)
LIBC.uselocale.restype = LIBC.newlocale.restype = ctypes.c_void_p
LIBC.uselocale.argtypes, LIBC.newlocale.argtypes = (
    [ctypes.c_void_p],
    [ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p],
)


class OnDevice(np.ndarray):
    """A NumPy array whose `data.ptr` is its address, as CuPy's is."""

    data = property(lambda self: SimpleNamespace(ptr=self.ctypes.data))


def there(*shape, dtype=np.float32):
    """Ones, on the device."""
    return np.ones(shape, dtype).view(OnDevice)


class OnDeviceArena:
    """An arena whose arrays are on the device."""

    def __init__(self, arena):
        self._arena = arena

    def take(self, shape, dtype):
        return self._arena.take(shape, dtype).view(OnDevice)


class RememberingKernel:
    """Stands in for cupy.RawKernel; `calls` are those of the driver: (grid, block, addresses of the arguments, shared)."""

    numbers = iter(range(1, 10**9))
    shared_size_bytes = 0

    def __init__(self):
        self.kernel = SimpleNamespace(ptr=next(self.numbers))
        self.asked, self.calls = [], []

    max_dynamic_shared_size_bytes = property(
        None, lambda self, nbytes: self.asked.append(nbytes)
    )  # to read it is a call


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
        LIBC.uselocale(
            LIBC.newlocale(1, b"C", None)
        )  # as NVRTC 12.2 does: this thread opens files as ASCII from now on
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
        return np.ndarray(
            (rows, columns), dtype, memory, strides=(dtype.itemsize, pitch * dtype.itemsize)
        )

    def gemmEx(
        self,
        handle,
        transa,
        transb,
        m,
        n,
        k,
        alpha,
        a,
        a_kind,
        lda,
        b,
        b_kind,
        ldb,
        beta,
        c,
        c_kind,
        ldc,
        compute,
        algorithm,
    ):
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
        self.cuda = SimpleNamespace(
            Device=lambda: SimpleNamespace(compute_capability=capability, attributes=ATTRIBUTES),
            nvrtc=RememberingCompiler(log),
            cublas=ColumnMajor(),
            get_cublas_handle=lambda: "handle",
            get_current_stream=lambda: SimpleNamespace(ptr=77),
            runtime=SimpleNamespace(driverGetVersion=lambda: 13000),
            driver=SimpleNamespace(launchKernel=self.launch_kernel),
        )
        self._core = SimpleNamespace(
            core=SimpleNamespace(
                assemble_cupy_compiler_options=lambda options: (
                    "--std=c++17",
                    "-I/of/cuda",
                    *options,
                )
            )
        )

    def launch_kernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, places, extra):
        (kernel,) = (kernel for kernel in self.kernels.values() if kernel.kernel.ptr == function)
        assert (stream, extra) == (77, 0)
        # The limit belongs to the function: the last request counts, also a smaller one.
        assert shared <= [(48 << 10) - kernel.shared_size_bytes, *kernel.asked][-1]
        kernel.calls.append(((gx, gy, gz), (bx, by, bz), places, shared))

    def RawModule(self, path):
        self.modules.append(json.loads(Path(path).read_text().rstrip("\0")))
        return SimpleNamespace(
            get_function=lambda name: self.kernels.setdefault(name, RememberingKernel())
        )


FLOATS = {"Element": "float", "Sum": "float"}
C_TYPES = {
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "long long": ctypes.c_longlong,
    "double": ctypes.c_double,
}


def passed(kernel, signature, defines):
    """What the driver would read as the arguments of the last call, by name."""
    places = (ctypes.c_void_p * len(signature.parameters)).from_address(kernel.calls[-1][2])
    kinds = [
        ctypes.c_void_p if each.is_pointer else C_TYPES[defines.get(each.type, each.type)]
        for each in signature.parameters
    ]
    return {
        each.name: kind.from_address(place).value
        for each, kind, place in zip(signature.parameters, kinds, places, strict=True)
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arguments_reach_the_driver_as_the_kernel_declares_them(dtype):
    cupy = RememberingCupy()
    kernels, (a, b, c) = (
        Kernels(CudaEngine(cupy)),
        (np.ones((3, 4), dtype).view(OnDevice) for _ in range(3)),
    )
    signature, sums = (
        package_sources()["gemm"].kernels["gemm"],
        {"float32": "float", "float64": "double"}[dtype],
    )
    for run in (1, 2, 3):  # looked at, then found again
        c = np.empty((3, 3), dtype).view(OnDevice)
        product.gemm(kernels, Arena(), a, b, c, transposed_b=True, alpha=run + 0.5)
        grid, block, _, shared = cupy.kernels["gemm"].calls[-1]
        assert (grid, block, shared) == ((1, 1, 1), (64, 1, 1), 0)
        found = passed(cupy.kernels["gemm"], signature, {"Sum": sums})
        assert found == {
            "M": 3,
            "N": 3,
            "K": 4,
            "alpha": run + 0.5,
            "A": a.data.ptr,
            "lda": 4,
            "stride_a": 0,
            "B": b.data.ptr,
            "ldb": 4,
            "stride_b": 0,
            "beta": 0.0,
            "C": c.data.ptr,
            "ldc": 3,
            "stride_c": 0,
            "bias": None,
            "residual": None,
            "saved": None,
            "row_sums": None,
            "splits": 1,
            "workspace": None,
            "groups": 0,
            "ends": None,
        }
    assert kernels.launches == 3


@pytest.mark.parametrize(
    ("shape", "ways", "by_library"),
    [
        ((64, 72, 40), {}, True),
        ((64, 72, 40), {"beta": 1.0}, True),
        ((64, 72, 40), {"transposed_a": True, "row_sums": there(64)}, True),
        ((64, 71, 40), {}, False),
        ((64, 72, 40), {"bias": there(72, dtype=ml_dtypes.bfloat16)}, False),
        ((64, 72, 40), {"alpha": 0.5}, False),
    ],
)
def test_auto_takes_cublas_for_bare_16_bit_products_on_hopper(shape, ways, by_library):
    m, n, k = shape
    rows = (k, m) if "transposed_a" in ways else (m, k)
    for dtype, capability in (
        (ml_dtypes.bfloat16, "90"),
        (ml_dtypes.bfloat16, "80"),
        (np.float32, "90"),
    ):
        cupy = RememberingCupy(capability=capability)
        arrays = (there(*each, dtype=dtype) for each in (rows, (k, n), (m, n)))
        if "bias" in ways and dtype is np.float32:
            continue
        multiply = product.chosen("auto")
        multiply(Kernels(CudaEngine(cupy)), OnDeviceArena(Arena()), *arrays, **ways)
        is_hopper = (dtype, capability) == (ml_dtypes.bfloat16, "90")
        assert len(cupy.cuda.cublas.modes) == (by_library and is_hopper)
        assert bool({"gemm", "gemm_tensor"} & {*cupy.kernels}) == (not (by_library and is_hopper))


def test_a_tensor_map_reaches_the_driver_by_value_and_is_made_once_for_a_buffer(monkeypatch):
    encoded = []

    class Driver:
        def cuTensorMapEncodeTiled(self, place, kind, dims, address, extents, pitches, box, *rest):
            encoded.append((kind, dims, address.value, [*extents], [*pitches], [*box], *rest[1:]))
            ctypes.memset(place, len(encoded), 128)
            return 0

    open_library = ctypes.CDLL
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: Driver() if name == "libcuda.so.1" else open_library(name)
    )
    cupy = RememberingCupy()
    kernels, signature = (
        Kernels(CudaEngine(cupy)),
        package_sources()["gemm_hopper"].kernels["gemm_hopper"],
    )
    a, b, c = (there(*shape, dtype=ml_dtypes.bfloat16) for shape in ((64, 40), (72, 40), (64, 72)))
    for _ in range(3):
        product.gemm(kernels, Arena(), a, b, c, transposed_b=True, table=MeasuredTiles(wgmma=True))
    rows, columns = (128, 128)
    assert [each[:6] for each in encoded] == [
        (9, 2, a.ctypes.data, [40, 64], [80], [64, rows]),
        (9, 2, b.ctypes.data, [40, 72], [80], [64, columns]),
    ]
    assert {each[6:] for each in encoded} == {(0, 3, 3, 0)}, "swizzled by 128 bytes, zeros outside"
    grid, block, places, _ = cupy.kernels["gemm_hopper"].calls[-1]
    assert (grid, block) == ((1, 1, 1), (384, 1, 1))
    pointers = (ctypes.c_void_p * len(signature.parameters)).from_address(places)
    assert [ctypes.string_at(pointers[i], 128) for i in (0, 1)] == [b"\1" * 128, b"\2" * 128]
    assert [ctypes.c_int.from_address(pointers[i]).value for i in (2, 3, 4)] == [64, 72, 40]
    with pytest.raises(KernelError, match="argument `a_map` must be a tensor map"):
        kernels.launch(
            "gemm_hopper",
            (1,),
            (384,),
            (b"", *[None] * 14),
            Element="__nv_bfloat16",
            Result="float",
        )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"p": np.ones(4, np.float64)}, "argument `p` must be .* float32, but is of float64"),
        ({"g": np.ones((4, 2), np.float32)[:, 0]}, r"strides \(8,\)"),
        ({"g": 1.0}, "argument `g` must be .* but is 1.0"),
        ({"beta": "much"}, "argument `beta` must be a number of float32, but is 'much'"),
    ],
)
def test_a_launch_that_is_found_again_is_refused_as_the_first_one_is(wrong, said):
    cupy = RememberingCupy()
    kernels = Kernels(CudaEngine(cupy))
    p, g, m, numbers = (np.ones(4, np.float32).view(OnDevice) for _ in range(4))
    arrays = {"p": p, "g": g, "m": m, "mirror": None}
    good = arrays | {"table": None, "numbers": numbers, "beta": 0.0}
    for _ in range(2):
        kernels.launch("momentum", (1,), (256,), (4, *good.values()), **FLOATS)
    changed = {
        **good,
        **{name: x.view(OnDevice) if isinstance(x, np.ndarray) else x for name, x in wrong.items()},
    }
    with pytest.raises(KernelError, match=said):
        kernels.launch("momentum", (1,), (256,), (4, *changed.values()), **FLOATS)
    with pytest.raises(KernelError, match="a number of int64"):
        kernels.launch("momentum", (1,), (256,), (2**63, *good.values()), **FLOATS)
    assert len(cupy.kernels["momentum"].calls) == 2


def test_a_source_is_compiled_once_for_each_set_of_macros():
    cupy = RememberingCupy()
    kernels = Kernels(CudaEngine(cupy))
    a, b = there(3, 3), there(3, 3, dtype=np.float16)
    for _ in range(2):
        for x in (a, b):
            product.gemm(kernels, Arena(), x, x, np.empty_like(x))
    assert len(cupy.modules) == 2
    code, options = cupy.modules[0]
    assert '#include "' not in code, "CuPy's cache would not notice a changed header"
    assert {
        "--std=c++17",
        "-default-device",
        "-DElement=float",
        "-DTILE_M=32",
        "-I/of/cuda",
    } <= set(options)


def test_files_are_opened_as_before_once_a_kernel_was_compiled():
    LIBC.uselocale(-1)  # the process's
    cupy, a, before = RememberingCupy(), there(3, 3), LIBC.uselocale(None)
    product.gemm(Kernels(CudaEngine(cupy)), Arena(), a, a, a.copy())
    assert cupy.modules and LIBC.uselocale(None) == before


@pytest.mark.parametrize(
    ("capability", "is_compiled_for"),
    [
        ("75", "sm_75"),
        ("89", "sm_89"),
        ("90", "sm_90a"),
        ("100", "sm_100a"),
        ("121", "compute_100"),
    ],
)
def test_a_source_is_compiled_for_the_chip_or_the_newest_known(capability, is_compiled_for):
    cupy, a = RememberingCupy(capability=capability), there(3, 3)
    product.gemm(Kernels(CudaEngine(cupy)), Arena(), a, a, a.copy())
    assert cupy.modules[0][1][0] == f"-arch={is_compiled_for}"


def test_what_a_driver_cannot_load_is_not_compiled():
    """CuPy takes the newest NVRTC that is installed, whatever the driver."""
    cupy = RememberingCupy()
    CudaEngine(cupy)
    cupy.cuda.runtime.driverGetVersion = lambda: 12080
    with pytest.raises(ConfigError, match=r"NVRTC 13\.0.*CUDA 12\.8"):
        CudaEngine(cupy)


def test_without_nvrtc_it_is_said_how_to_get_it():
    cupy = RememberingCupy()

    def missing():
        raise RuntimeError('Failure finding "libnvrtc.so.13"\nand more')

    cupy.cuda.nvrtc.getVersion = missing
    with pytest.raises(ConfigError) as refused:
        CudaEngine(cupy)
    assert (
        refused.value.law.endswith('Failure finding "libnvrtc.so.13"')
        and "pip install" in refused.value.way_out
    )


def test_the_next_process_finds_compiled_code_and_never_half_a_file(tmp_path):
    a = there(3, 3)
    for cupy in (RememberingCupy(), RememberingCupy("nothing may be compiled again")):
        product.gemm(Kernels(CudaEngine(cupy, tmp_path)), Arena(), a, a, a.copy())
    (path,) = (path for path in tmp_path.iterdir() if path.suffix not in (".lock", ".sha256"))
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
        cupy._core.core.assemble_cupy_compiler_options = lambda options: (NEWEST.include,)
        cupy.RawModule = lambda path, has=cupy.kernels: (
            loaded.append(path)
            or SimpleNamespace(get_function=lambda name: has.setdefault(name, RememberingKernel()))
        )
        kernels = Kernels(CudaEngine(cupy, tmp_path / "compiled"), tmp_path)
        if capability == "90":
            kernels.launch("waits", (1,), (1,), (there(1),))
        else:
            with pytest.raises(
                KernelError, match=r"cannot compile waits\.cu for sm_80:\n(.|\n)*wgmma"
            ):
                kernels.launch("waits", (1,), (1,), (there(1),))
    code = Path(loaded[0]).read_bytes()
    headers, (nbytes, count) = (
        struct.unpack_from("<Q", code, 32)[0],
        struct.unpack_from("<HH", code, 54),
    )
    assert code[:4] == b"\x7fELF" and len(loaded) == 1
    assert headers + nbytes * count == len(code), (
        "the headers of what is loaded come last, and are whole"
    )


def test_the_device_is_asked_what_it_has_room_for():
    engine = CudaEngine(RememberingCupy())
    assert engine.multiprocessor == H100 and engine.multiprocessors == 132


def test_ranks_of_a_host_share_the_compilations(tmp_path, monkeypatch):
    """Four ranks with one cache: each source once, each rank some, and at the end all of them are there."""
    made = defaultdict(list)

    def compiled(self, program, options):
        made[threading.get_ident()].append(options)
        time.sleep(0.02)

    monkeypatch.setattr(RememberingCompiler, "compileProgram", compiled)
    widths = [("dropout", {"Element": "float", "Sum": "float", "WIDTH": str(n)}) for n in range(20)]

    def prepare(transport):
        cupy = RememberingCupy()
        cupy.cuda.nvrtc.getCUBIN = lambda program: b"code"
        kernels = Kernels(CudaEngine(cupy, tmp_path))
        kernels.expected = {(name, tuple(words.items())): None for name, words in widths}
        transport.gather_text("begin together")
        kernels.prepare(transport.rank, transport.size)
        return len([*tmp_path.glob("*.cubin")])

    assert run_ranks(4, prepare) == [20] * 4
    shares = [*map(len, made.values())]
    assert sum(shares) == 20 and len(shares) == 4 and max(shares) <= 8, shares


def test_a_measured_tile_is_the_one_that_is_launched():
    cupy, a = RememberingCupy(), there(100, 100)
    table = MeasuredTiles([FastestTile("float32", "NT", 128, 128, 128, Tiling(TILES[1], 1))])
    multiply = partial(
        product.gemm, Kernels(CudaEngine(cupy)), Arena(), a, a, np.empty_like(a), table=table
    )
    for transposed_b, tile in ((True, TILES[1]), (False, TILES[2])):
        multiply(transposed_b=transposed_b)
        assert {f"-D{macro}={value}" for macro, value in tile._asdict().items()} <= set(
            cupy.modules[-1][1]
        )


def test_shared_memory_above_48_kib_is_asked_for_first():
    cupy = RememberingCupy()
    kernels = Kernels(CudaEngine(cupy))
    a = there(256, 256, dtype=np.float16)
    product.gemm(kernels, Arena(), a, a, np.empty_like(a), tiling=Tiling(TENSOR_TILES[0], 1))
    product.gemm(kernels, Arena(), a, a, np.empty_like(a), tiling=Tiling(TENSOR_TILES[0], 1))
    kernel = cupy.kernels["gemm_tensor"]
    assert (
        kernel.asked == [kernel.calls[0][3]] == [kernel.calls[1][3]] and kernel.asked[0] > 48 << 10
    )


def test_a_kernel_with_blocks_of_two_sizes_keeps_the_larger_shared_memory():
    cupy = RememberingCupy()
    ops, targets = cuda_ops(Kernels(CudaEngine(cupy))), there(1, dtype=np.int64)
    for vocabulary in (100_000, 50_257, 100_000):
        logits = there(1, vocabulary, dtype=ml_dtypes.bfloat16)
        ops.cross_entropy(logits, targets, 1.0, OnDeviceArena(Arena()))
    kernel = cupy.kernels["cross_entropy"]
    assert len({block for _, block, *_ in kernel.calls}) == 2 and kernel.asked == [200_000]


def test_each_thread_launches_a_kernel_with_its_own_arguments():
    cupy, received, lock = RememberingCupy(), [], threading.Lock()
    signature = package_sources()["steps"].kernels["momentum"]

    def launch_kernel(*call):
        time.sleep(0)  # as CuPy, which calls the driver without the interpreter's lock
        with lock:
            cupy.launch_kernel(*call)
            received.append((call[1], passed(cupy.kernels["momentum"], signature, FLOATS)["n"]))

    cupy.cuda.driver.launchKernel = launch_kernel
    kernels = Kernels(CudaEngine(cupy))

    def launches(transport):
        x, blocks = there(4), transport.rank + 1
        for _ in range(100):
            arguments = blocks, x, x, x, None, None, x, 0.5
            kernels.launch("momentum", (blocks,), (256,), arguments, **FLOATS)

    run_ranks(2, launches)
    assert len(received) == 200 and all(blocks == n for blocks, n in received)


@pytest.mark.parametrize(
    ("source", "kernel", "dynamic"),
    [
        ("layer_norm", "layer_norm_backward_wide", 16 * 3072),
        ("cross_entropy", "cross_entropy", 2 * 24576),
    ],
)
def test_static_and_dynamic_shared_memory_share_48_kib(source, kernel, dynamic):
    """A width of 3072 and a vocabulary of 24,576 in bfloat16 ask for all of it as dynamic memory."""
    macros = {"Element": "__nv_bfloat16", "Sum": "float", "Index": "long long"}
    compiled = Compiler().compile(package_sources()[source], "sm_90a", macros)
    static = usages(compiled.log)[kernel].shared
    assert static > 0 and dynamic <= 48 << 10 < static + dynamic
    cupy = RememberingCupy()
    cupy.kernels[kernel] = RememberingKernel()
    cupy.kernels[kernel].shared_size_bytes = static
    kernels, arena = Kernels(CudaEngine(cupy)), Arena()
    if source == "layer_norm":
        x, gain, saved = there(2, 3072), there(3072), there(2)
        cuda_ops(kernels).layer_norm_backward_input(
            x, gain, (x, saved, saved), OnDeviceArena(arena)
        )
    else:
        logits = stored(np.ones((2, 24576)), "bfloat16").view(OnDevice)
        targets = there(2, dtype=np.int64)
        cuda_ops(kernels).cross_entropy(logits, targets, 1.0, OnDeviceArena(arena))
    assert cupy.kernels[kernel].asked == [dynamic]


@pytest.mark.parametrize(("number", "before"), [(1e39, 0), (-1e300, 0), (10**400, 0), (10**400, 3)])
def test_a_number_beyond_its_type_is_refused(number, before):
    cupy = RememberingCupy()
    kernels = Kernels(CudaEngine(cupy))
    p, g, m, numbers = (there(4) for _ in range(4))

    def launch(beta):
        arguments = 4, p, g, m, None, None, numbers, beta
        kernels.launch("momentum", (1,), (256,), arguments, **FLOATS)

    for beta in (0.5, float("inf"), float("nan"))[:before]:
        launch(beta)
    with pytest.raises(KernelError, match="a number of float32"):
        launch(number)
    assert len(cupy.kernels["momentum"].calls if cupy.kernels else ()) == before


def test_a_failed_compilation_is_our_error_with_the_compilers_words():
    a = there(3, 3)
    with pytest.raises(
        KernelError, match=r"NVRTC cannot compile gemm\.cu for sm_90a:\n.*gemm\.cu\(7\): error"
    ):
        product.gemm(
            Kernels(CudaEngine(RememberingCupy("gemm.cu(7): error: x"))), Arena(), a, a, a.copy()
        )


@pytest.mark.parametrize(("ta", "tb"), [(False, True), (False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        ("float32", "float32"),
        ("float64", "float64"),
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_the_library_is_asked_for_the_product_of_rows(ta, tb, dtype, result):
    cupy, (m, n, k) = RememberingCupy(), (3, 5, 4)
    engine = CudaEngine(cupy)
    for accumulate, gap in ((False, 0), (True, 3)):
        a, b, c = (
            stored(numbers(seed, rows, columns + gap), kind)[:, :columns].view(OnDevice)
            for seed, rows, columns, kind in (
                (1, *((k, m) if ta else (m, k)), dtype),
                (2, *((n, k) if tb else (k, n)), dtype),
                (3, m, n, result),
            )
        )
        truth = (values(a).T if ta else values(a)) @ (
            values(b).T if tb else values(b)
        ) + accumulate * values(c)
        engine.multiply(a, b, c, ta, tb, accumulate)
        assert_close(c, truth, result)
    assert cupy.cuda.cublas.modes == [("handle", ColumnMajor.CUBLAS_DEFAULT_MATH)] * 2, (
        "TF32 is never on"
    )


def test_what_the_library_cannot_do_is_refused():
    kernels, a = Kernels(CudaEngine(RememberingCupy())), np.ones((3, 3), np.float32)
    with pytest.raises(KernelError, match="does not fit into"):
        product.library(kernels, Arena(), a, a, np.ones((3, 2), np.float32))


def test_where_cupy_finds_no_cublas_it_is_said_how_to_get_it():
    """CuPy's wheels have none: it is looked for when the module is first asked for, which then is an ImportError."""

    class WithoutCublas(SimpleNamespace):
        @property
        def cublas(self):
            raise ImportError('Failure finding "libcublasLt.so.13": No such file\n\nmore lines')

    cupy, a = RememberingCupy(), np.ones((3, 3), np.float32).view(OnDevice)
    vars(cupy.cuda).pop("cublas")
    cupy.cuda = WithoutCublas(**vars(cupy.cuda))
    with pytest.raises(
        ConfigError, match=r"need cuBLAS, but .* it: Failure .* No such file\nInstall it: .*cuda13"
    ):
        CudaEngine(cupy).multiply(a, a, a.copy(), False, False, False)


def test_a_single_row_may_have_any_stride():
    a, b, c = (
        np.ones((8, 4), np.float32)[::9].view(OnDevice),
        np.ones((4, 3), np.float32).view(OnDevice),
        np.zeros((1, 3), np.float32).view(OnDevice),
    )
    a = np.lib.stride_tricks.as_strided(a, (1, 4), (0, 4), subok=True)
    CudaEngine(RememberingCupy()).multiply(a, b, c, False, False, False)
    assert c.tolist() == [[4, 4, 4]]
