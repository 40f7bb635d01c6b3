"""Bank conflicts and sectors, as the simulator counts them: of planted accesses, and of every kernel."""

from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli.bench.collectives import command
from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.machine.backend import Arena
from mpitrain.ops.cuda import product, wire
from mpitrain.ops.cuda.tiles import FLOAT_TILES, TENSOR_TILES, TILES, Tiling
from mpitrain.ops.cuda.wire import top_k
from mpitrain.tools.bench.kernels.transactions import STEP, count, has_conflicts, updates
from tests.cases.numbers import numbers, stored
from tests.cases.packed import Packed, on
from tests.unit.kernels.test_traffic import traffic

pytestmark = pytest.mark.compile


def planted(name, *arguments, Element="float"):
    """The traffic of one warp."""
    found = []
    kernels = Kernels(Simulator(checked=True, traffic=found), Path(__file__).parent)
    kernels.launch(name, (1,), (32,), arguments, Element=Element)
    return found[0]


TYPES = {"float": np.float32, "double": np.float64, "__half": np.float16}


@pytest.mark.parametrize(
    ("kind", "stride", "passes"),
    [
        ("float", 1, 1),
        ("float", 2, 2),
        ("float", 3, 1),
        ("float", 4, 4),
        ("float", 16, 16),
        ("float", 32, 32),
        ("float", 33, 1),
        ("double", 1, 2),
        ("double", 2, 4),
        ("double", 16, 32),
        ("double", 17, 2),
        ("__half", 1, 1),
        ("__half", 2, 1),
        ("__half", 4, 2),
    ],
)
def test_strides_meet_in_banks_as_on_a_gpu(kind, stride, passes):
    found = planted("strided", stride, np.ones(32, TYPES[kind]), Element=kind)
    least = 2 if kind == "double" else 1
    assert [(each.requests, each.passes, each.least) for each in found.shared] == [
        (1, passes, least),
        (1, passes, least),
    ]
    assert [each.writes for each in found.shared] == [True, False]
    assert all(bool(each.where) == has_conflicts(each) for each in found.shared)


def test_lanes_that_read_one_word_are_served_at_once():
    assert [each.passes for each in planted("one_word", np.ones(32, np.float32)).shared] == [1, 1]


@pytest.mark.parametrize(("apart", "passes"), [(0, 32), (1, 1)])
def test_atomics_on_one_word_take_turns(apart, passes):
    shared = planted("added", apart, np.zeros(32, np.uint32)).shared
    assert sorted((each.requests, each.passes) for each in shared) == [(1, 1), (1, 1), (1, passes)]


def test_lanes_that_go_round_more_often_make_requests_of_their_own():
    write, _ = planted("unequal", 5, np.ones(64, np.float32)).shared
    assert (write.requests, write.passes, write.least) == (2, 2, 2)


@pytest.mark.parametrize(("pitch", "sectors"), [(1, 4), (2, 8), (4, 16), (8, 32), (9, 32)])
def test_a_request_touches_the_sectors_of_its_words(pitch, sectors):
    memory = np.zeros(32 * 9 + 8, np.float32)
    x = memory[-memory.ctypes.data % 32 // 4 :][: 31 * pitch + 1]
    y = np.zeros(40, np.float32)[:32]
    found = planted("columns_of", pitch, x, y)
    assert abs(found.sectors["x"] - sectors) <= 1 and 4 <= found.sectors["y"] <= 5


STORES_OF_16 = "gemm.cu"
"""Where the tile is 16 deep, the transposing store of float32 products meets each bank twice. No padding that keeps fours
aligned avoids this, and it is one store in nine shared accesses."""


def test_no_kernel_of_a_training_step_has_bank_conflicts(binutils):
    rows = list(count(["float32", "bfloat16"]))
    assert {row.operation for row in rows} == {*STEP.split(), *updates()}
    assert {row.dtype for row in rows} == {"float32", "bfloat16"}
    for row in rows:
        if row.kernel != "gemm":
            assert row.passes == row.least, row
        assert row.conflicts.partition(":")[0] in ("", STORES_OF_16), row
    assert sum(row.requests for row in rows) > 10_000


WORST = {"gemm": {8: 1.0, 16: 1.25}, "gemm_tensor": {16: 1.0, 32: 1.0, 64: 1.0}}
"""Kernel -> depth of a tile -> most passes for each that no layout avoids."""


@pytest.mark.parametrize("tile", [*TILES, *TENSOR_TILES, *FLOAT_TILES])
def test_tiles_of_products_meet_no_bank_twice(tile):
    dtype, depth = "bfloat16" if tile in TENSOR_TILES else "float32", 2 * tile.TILE_K
    for stored_as in ("NT", "NN", "TN"):
        a, b = (
            stored(numbers(seed, *((depth, wide) if by_depth else (wide, depth))), dtype)
            for seed, wide, by_depth in (
                (1, tile.TILE_M, stored_as[0] == "T"),
                (2, tile.TILE_N, stored_as[1] == "N"),
            )
        )
        c = stored(numbers(3, tile.TILE_M, tile.TILE_N), dtype)
        ways = {"transposed_a": stored_as[0] == "T", "transposed_b": stored_as[1] == "T"}
        (found,) = traffic(
            lambda kernels, a=a, b=b, c=c, ways=ways: product.gemm(
                kernels, Arena(), a, b, c, tiling=Tiling(tile, 1), **ways
            )
        )
        passes, least = (
            sum(getattr(x, name) for x in found.shared) for name in ("passes", "least")
        )
        assert passes <= WORST[tile.kernel][tile.TILE_K] * least, (stored_as, found.shared)
        if tile not in TILES:  # the sums pass through shared memory once, on their way out
            sums = tile.TILE_M * tile.TILE_N / 16
            # Behind the last step so many stages are filled with zeros, and one slice is loaded.
            elements = (tile.STAGES - 1) * tile.TILE_K * (tile.TILE_M + tile.TILE_N)
            zeros = tile.itemsize * elements / 128
            slice_of_k = tile.threads // 32 * (tile.WARP_M + tile.WARP_N) * 32 / 128
            assert passes == tile.loading * depth + sums + zeros + slice_of_k, stored_as


def test_attention_in_float32_meets_no_bank_twice():
    """Of 64 channels; a copy of a row of 16 or 80 meets some twice."""
    qkv, dy = stored(numbers(1, 1, 140, 3 * 64), "3xtf32"), stored(numbers(2, 1, 140, 64), "3xtf32")

    def both(kernels):
        ops = Packed(on(kernels, "3xtf32"))
        ops.attention_backward(dy, ops.attention(qkv, 1, Arena())[1], Arena())

    launches = traffic(both)
    names = {launch.kernel for launch in launches}
    assert {
        "attention_tensor",
        "attention_tensor_backward_kv",
        "attention_tensor_backward_q",
    } < names
    for launch in launches:
        assert not any(map(has_conflicts, launch.shared)), launch


def test_only_the_histogram_of_a_selection_has_bank_conflicts():
    """Its atomic additions meet where digits are equal, which depends on the numbers alone."""
    x = numbers(1, 2056).astype(np.float32)
    for launch in traffic(lambda kernels: top_k(kernels, x, 100, Arena())):
        if launch.kernel != "count_digits":
            assert not any(map(has_conflicts, launch.shared)), launch


@pytest.mark.parametrize(("decode", "coded"), [("decode_int8", "int8"), ("decode_fp16", "float16")])
def test_decoded_numbers_fill_the_sectors_that_they_touch(decode, coded):
    q, y = np.ones(1 << 12, coded), np.empty(1 << 12, np.float32)
    scales = np.ones(q.size // wire.BLOCK, np.float32)
    (found,) = traffic(lambda kernels: getattr(wire, decode)(kernels, q, scales, y, False))
    assert (found.sectors["q"], found.sectors["y"]) == (q.nbytes / 32, y.nbytes / 32)


def test_the_command_prints_each_launch():
    done = CliRunner().invoke(command, ["transactions", "--dtype", "bfloat16"])
    lines = [line.split() for line in done.stdout.splitlines()[2:]]
    assert done.exit_code == 0 and {line[2] for line in lines} >= {"gemm_tensor", "cross_entropy"}
    assert {line[7] for line in lines} == {"0"}
