"""Every source compiles for real architectures, without a GPU, and needs no more than the hardware has."""

import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from mpitrain.kernels.source import package_sources
from mpitrain.ops.cuda.attention import SHARED
from mpitrain.ops.cuda.tiles import TENSOR_TILES, TILES, USUAL
from tests.unit.kernels.nvrtc import Compiler, usages

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("nvrtc")]    # the first of them compiles everything
SOURCES = package_sources()
ARCHITECTURES = ("sm_75", "sm_80", "sm_90")
ELEMENTS = {"float": "float", "double": "double", "__half": "float", "__nv_bfloat16": "float"}
# Forward, input half, weight half of a linear layer: (TRANSPOSED_A, TRANSPOSED_B, ROW_SUMS).
PRODUCTS = ((0, 1, 0), (0, 0, 0), (1, 0, 1))


def types(element: str) -> dict[str, object]:
    """Every macro that a source without tiles may need."""
    return {"Element": element, "Result": element, "Sum": ELEMENTS[element], "Index": "long long", "BLOCK": 256,
            "ROW_SUMS": 1, "HEAD": 64, "TILE": 64, "STEP": 64}


def jobs():
    """(source, architecture, macros) of everything that is compiled here."""
    for name in set(SOURCES) - {"gemm", "gemm_tensor", "attention_tensor"}:
        for architecture in ARCHITECTURES:
            yield name, architecture, types("float")
        for element in ("double", "__half", "__nv_bfloat16") if name != "top_k" else ():
            yield name, "sm_80", types(element)
    for architecture, (head, step) in product(ARCHITECTURES[1:], ((64, 64), (128, 16))):
        yield "attention_tensor", architecture, types("__nv_bfloat16") | {"HEAD": head, "STEP": step}
    yield "attention_tensor", "sm_75", types("__half")    # compiles there too, but `choose` takes it from sm_80 on
    for (ta, tb, sums), architecture in product(PRODUCTS, ARCHITECTURES):
        stored = {"TRANSPOSED_A": ta, "TRANSPOSED_B": tb, "ROW_SUMS": sums}
        for tile in (TILES if sums else TILES[:USUAL]) if architecture == "sm_80" else TILES[:1]:
            yield "gemm", architecture, types("float") | tile._asdict() | stored
        for tile in (TENSOR_TILES if sums else TENSOR_TILES[:USUAL]) if architecture == "sm_80" else TENSOR_TILES[:1]:
            element, stages = ("__half", {"STAGES": 2}) if architecture == "sm_75" else ("__nv_bfloat16", {})
            yield "gemm_tensor", architecture, types(element) | tile._asdict() | stages | stored


@pytest.fixture(scope="module")
def compiler():
    return Compiler()


@pytest.fixture(scope="module")
def compiled(compiler):
    """[(what was compiled, resources of its kernels)]; two at a time, since ctypes lets other threads run."""
    def compile(job):
        name, architecture, macros = job
        return f"{name} {architecture} {macros}", usages(compiler.compile(SOURCES[name], architecture, macros)[1])

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile, jobs()))


def test_every_source_compiles_for_every_architecture(compiled):
    names = {name for source in SOURCES.values() for name in source.kernels}
    for architecture in ARCHITECTURES:
        assert {name for what, kernels in compiled if f" {architecture} " in what for name in kernels} == names


def test_no_kernel_spills_registers(compiled):
    """In double, which is for proofs, the large ones may."""
    assert [(what, name) for what, kernels in compiled for name, usage in kernels.items()
            if usage.spilled and "'Sum': 'double'" not in what] == []


def test_static_shared_memory_fits_any_device(compiled):
    assert [(what, name) for what, kernels in compiled for name, usage in kernels.items() if usage.shared > 48 << 10] == []


def test_the_large_float32_product_leaves_room_for_two_blocks(compiled):
    registers = [kernels["gemm"].registers for what, kernels in compiled
                 if what.startswith(("gemm sm_80", "gemm sm_90")) and "'TILE_M': 128, 'TILE_N': 128" in what]
    assert len(registers) == 6
    assert max(registers) <= 128


@pytest.mark.parametrize("capability", [75, 80, 90])
def test_every_tile_of_tensor_cores_has_the_shared_memory_it_asks_for(capability):
    for tile in TENSOR_TILES:
        assert (tile._replace(STAGES=2) if capability == 75 else tile).shared <= SHARED[capability]


@pytest.mark.parametrize("name", SOURCES)
def test_shared_arrays_are_as_aligned_as_their_widest_access(compiler, name):
    """x86-64 aligns every array to 16 bytes, so the simulator cannot see this; the PTX can."""
    tile, element = (TENSOR_TILES[0], "__half") if name.endswith("tensor") else (TILES[0], "float")
    macros = types(element) | {"TRANSPOSED_A": 0, "TRANSPOSED_B": 0}
    if name != "attention_tensor":
        macros |= tile._asdict()
    ptx = compiler.compile(SOURCES[name], "compute_80", macros)[0].decode(errors="replace")
    widths = [int(n) * int(bits) // 8 for n, bits in re.findall(r"(?:ld|st)\.shared\.v([24])\.[a-z](\d+)", ptx)]
    widths += [16] * len(re.findall(r"ldmatrix|cp\.async\.cg", ptx))
    declared = re.findall(r"\.shared \.align (\d+) \.b8 (\w+)", ptx)
    assert [array for alignment, array in declared if int(alignment) < max(widths, default=1)] == []
    if name in ("gemm", "attention"):
        assert 16 in widths, "shared memory is not read in fours"


@pytest.mark.parametrize("name", ["gemm", "pointwise", "layer_norm", "steps", "wire", "convert"])
def test_global_memory_is_moved_in_fours(compiler, name):
    macros = types("float") | TILES[0]._asdict() | {"TRANSPOSED_A": 0, "TRANSPOSED_B": 0}
    ptx = compiler.compile(SOURCES[name], "compute_80", macros)[0].decode(errors="replace")
    assert re.search(r"ld\.global(\.nc)?\.v4\.[fb]32", ptx) and re.search(r"st\.global\.v4\.[fb]32", ptx)
