"""The table of tiles: which tiling a shape gets, and what a file of tilings may hold."""

import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.kernels.loader import H100, Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.machine.backend import Arena
from mpitrain.ops.cuda import product
from mpitrain.ops.cuda.launches import SHARED
from mpitrain.ops.cuda.product import chosen
from mpitrain.ops.cuda.tiles import (
    FLOAT_TILES,
    HOPPER_TILES,
    TENSOR_TILES,
    TILES,
    AttentionGain,
    FastestTile,
    MeasuredTiles,
    Tiling,
    cost,
    count,
    possible,
    read_tiles,
    worth_measuring,
    write_tiles,
)
from mpitrain.run.count.operations import Unlaunched


def of(capability: int, multiprocessors: int = 132, **limits: int) -> SimpleNamespace:
    """A device, as far as tilings ask."""
    return SimpleNamespace(
        capability=capability,
        multiprocessors=multiprocessors,
        multiprocessor=H100._replace(**limits),
        has_wgmma=capability == 90,
    )


FLOATS, HALVES, BRAINS = (
    np.zeros(1, np.float32),
    np.zeros(1, np.float16),
    np.zeros(1, ml_dtypes.bfloat16),
)
FOUND = [
    FastestTile("float32", "NT", 1024, 1024, 1024, Tiling(TILES[3], 1)),
    FastestTile("float32", "NT", 64, 64, 8192, Tiling(TILES[2], 8)),
    FastestTile("bfloat16", "NN", 1024, 1024, 1024, Tiling(TENSOR_TILES[4], 2)),
    FastestTile("float32", "NT", 1024, 1024, 1024, Tiling(FLOAT_TILES[1], 3)),
]


def test_a_shape_near_a_measured_one_gets_its_plan():
    table = MeasuredTiles(FOUND)
    assert table.tiling(FLOATS, "NT", (1024, 2048, 512, 1), of(80)) == Tiling(TILES[3], 1)
    assert table.tiling(FLOATS, "NT", (100, 33, 5000, 1), of(80)) == Tiling(TILES[2], 8)
    assert table.tiling(BRAINS, "NN", (1000, 1000, 1000, 1), of(90)) == Tiling(TENSOR_TILES[4], 2)
    table = MeasuredTiles(FOUND, is_3xtf32=True)
    assert table.tiling(FLOATS, "NT", (1024, 1000, 1024, 1), of(90)) == Tiling(FLOAT_TILES[1], 3)
    table = MeasuredTiles(
        [FastestTile("float32", "NT", 64, 64, 8192, Tiling(FLOAT_TILES[1], 1))], True
    )
    for k, splits in ((8192, 1), (8193, 2), (16384, 2)):  # no sum is longer than 8192
        assert table.tiling(FLOATS, "NT", (64, 64, k, 1), of(90)) == Tiling(FLOAT_TILES[1], splits)


@pytest.mark.parametrize(("gain", "takes"), [(1.31, True), (1.29, False), (0.0, False)])
def test_float32_goes_to_tensor_cores_where_a_measured_shape_gained_enough(gain, takes, tmp_path):
    path, other = tmp_path / "tiles.json", Tiling(FLOAT_TILES[1], 1)
    write_tiles(path, "a GPU", [FastestTile("float32", "NT", 512, 512, 512, other, gain)])
    for table, expected in (
        (chosen("auto", str(path)).keywords["table"], takes),
        (chosen("tiled", str(path)).keywords["table"], False),
    ):
        assert (table.tiling(FLOATS, "NT", (600, 512, 400, 1), of(90)) == other) == expected
        assert table.tiling(FLOATS, "NT", (600, 512, 400, 1), of(75)).tile in TILES
        assert table.tiling(FLOATS, "NT", (4096, 512, 400, 1), of(90)).tile in TILES


@pytest.mark.parametrize(
    ("gain", "head", "tokens", "takes"),
    [(1.31, 64, 600, True), (1.29, 64, 600, False), (1.31, 80, 600, False), (9.0, 64, 300, False)],
)
def test_attention_in_float32_goes_to_tensor_cores_where_it_gained_enough(
    gain, head, tokens, takes, tmp_path
):
    path = tmp_path / "tiles.json"
    write_tiles(path, "a GPU", [], [AttentionGain(64, 1024, gain)])
    for way, expected in (("auto", takes), ("tiled", False), ("3xtf32", True)):
        table = chosen(way, str(path)).keywords["table"]
        assert table.splits_attention(head, tokens) == expected, way


@pytest.mark.parametrize(
    ("tokens", "takes"), [(500, True), (700, True), (730, False), (2048, False), (1 << 20, False)]
)
def test_the_gain_of_the_nearest_number_of_tokens_decides(tokens, takes):
    gains = [AttentionGain(64, 512, 1.5), AttentionGain(64, 1024, 1.1), AttentionGain(80, 730, 9.0)]
    assert MeasuredTiles((), by_gain=True, attention=gains).splits_attention(64, tokens) == takes


@pytest.mark.parametrize(
    ("gain", "capability", "tensor_cores", "takes"),
    [
        (1.1, 80, "mma", True),
        (1.1, 90, "wgmma", True),
        (1.04, 90, "mma", False),
        (0.0, 90, "mma", True),
        (0.0, 90, "wgmma", False),
    ],
)
def test_auto_takes_the_library_where_a_measured_shape_gained_enough(
    gain, capability, tensor_cores, takes, tmp_path
):
    tile = HOPPER_TILES[3] if tensor_cores == "wgmma" else TENSOR_TILES[1]
    entry = FastestTile("bfloat16", "NT", 64, 72, 40, Tiling(tile, 1), library=gain)
    write_tiles(tmp_path / "tiles.json", "a GPU", [entry])
    table = chosen("auto", str(tmp_path / "tiles.json"), tensor_cores).keywords["table"]

    def by_library(k: int, **ways: object) -> bool:
        shapes = (64, k), (72, k) if ways.get("transposed_b") else (k, 72), (64, 72)
        arrays = [np.empty(shape, BRAINS.dtype) for shape in shapes]
        return product.library_is_faster(of(capability), table, *arrays, **ways)

    assert by_library(48, transposed_b=True) == takes
    assert not by_library(48, transposed_b=True, bias=BRAINS), "it has no epilogue"
    unmeasured = (capability, tensor_cores) == (90, "mma")
    assert by_library(200, transposed_b=True) == by_library(48) == unmeasured


def test_float32_is_copied_in_chunks_only_where_each_product_allows():
    """A plan is of a shape and an alignment, also where a measured gain sends float32 to tensor cores."""
    kernels, tiling = Kernels(Simulator()), Tiling(FLOAT_TILES[2], 1)
    gained = FastestTile("float32", "NN", 32, 32, 32, tiling, 2.0)
    unlaunched, table = Unlaunched(kernels), MeasuredTiles([gained], by_gain=True)
    buffer = np.empty(3 * 1024 + 17, np.float32)
    aligned = buffer[-buffer.ctypes.data % 64 // 4 :]
    for first in (0, 1):
        a, b, c = (aligned[at : at + 1024].reshape(32, 32) for at in (2048 + first, 0, 1024))
        product.gemm(unlaunched, Arena(), a, b, c, table=table)
    assert [dict(macros)["CHUNKED"] for _, macros in kernels.expected] == ["1", "0"]


@pytest.mark.parametrize(
    ("a", "stored", "shape", "capability"),
    [
        (FLOATS, "NT", (1024, 2049, 1024, 1), 80),
        (FLOATS, "NN", (1024, 1024, 1024, 1), 80),
        (FLOATS, "NT", (1024, 1024, 1024, 2), 80),
        (HALVES, "NT", (1024, 1024, 1024, 1), 80),
        (BRAINS, "NN", (1024, 1024, 1024, 1), 75),
        (FLOATS, "NT", (0, 3, 0, 1), 80),
    ],
)
def test_everything_else_is_planned_as_without_a_table(a, stored, shape, capability):
    assert MeasuredTiles(FOUND).tiling(a, stored, shape, of(capability)) == MeasuredTiles().tiling(
        a, stored, shape, of(capability)
    )


@pytest.mark.parametrize(
    ("a", "shape", "multiprocessors", "tiling"),
    [
        (FLOATS, (8192, 8192, 8192, 1), 132, Tiling(TILES[0], 1)),
        (FLOATS, (1024, 1024, 1024, 1), 132, Tiling(TILES[0], 2)),
        (FLOATS, (512, 512, 64, 1), 132, Tiling(TILES[2], 1)),
        (FLOATS, (32, 32, 8192, 1), 132, Tiling(TILES[2], 32)),
        (FLOATS, (0, 0, 0, 1), 132, Tiling(TILES[0], 1)),
        (FLOATS, (1024, 1024, 1024, 1), 16, Tiling(TILES[0], 1)),
        # The gradients of GPT-2's narrow layers: 36 large blocks leave most of a large GPU idle, 144 small ones take two rounds.
        (FLOATS, (768, 768, 8192, 1), 132, Tiling(TILES[0], 11)),
        # On tensor cores 18 blocks in 7 parts are one for nearly every multiprocessor.
        (BRAINS, (768, 768, 8192, 1), 132, Tiling(TENSOR_TILES[7], 7)),
        # 128 tall blocks in 2 parts are two for nearly every multiprocessor, 144 square ones leave every other place empty.
        (BRAINS, (3072, 768, 8192, 1), 132, Tiling(TENSOR_TILES[4], 2)),
        # The largest tile reads fewest bytes from the L2 cache.
        (BRAINS, (8192, 2304, 768, 1), 132, Tiling(TENSOR_TILES[5], 1)),
        (BRAINS, (8192, 768, 768, 1), 132, Tiling(TENSOR_TILES[5], 1)),
        (BRAINS, (1024, 1024, 1024, 1), 132, Tiling(TENSOR_TILES[1], 1)),
    ],
)
def test_untuned_tiles_weigh_waves_and_split_sums(a, shape, multiprocessors, tiling):
    assert MeasuredTiles().tiling(a, "NT", shape, of(90, multiprocessors)) == tiling


@pytest.mark.parametrize(
    ("shape", "tiling"),
    [
        ((8192, 8192, 8192, 1), Tiling(FLOAT_TILES[0], 1)),
        ((8192, 768, 768, 1), Tiling(FLOAT_TILES[0], 1)),
        ((768, 768, 8192, 1), Tiling(FLOAT_TILES[0], 11)),
        ((8192, 768, 50257, 1), Tiling(FLOAT_TILES[0], 11)),  # no sum is longer than 8192
        ((32, 32, 64, 1), Tiling(FLOAT_TILES[2], 1)),
    ],
)
def test_float32_takes_tensor_cores_where_it_may(shape, tiling):
    table = MeasuredTiles(is_3xtf32=True)
    assert table.tiling(FLOATS, "NT", shape, of(90)) == tiling
    assert table.tiling(FLOATS, "NT", shape, of(75)).tile in TILES
    assert table.tiling(FLOATS.astype(np.float64), "NT", shape, of(90)).tile in TILES
    for capability in SHARED:
        assert possible(FLOATS, capability, True) == (TILES if capability < 80 else FLOAT_TILES)


def test_blocks_on_one_multiprocessor_overlap_copies_and_products():
    """36 tiles in 7 parts are two blocks on each. With room for one alone, they take longer."""
    tiling, shape = Tiling(TENSOR_TILES[3], 7), (768, 768, 8192, 1)
    together = cost(tiling, *shape, of(90))
    for limits in ({"blocks": 1}, {"shared": 100 << 10}, {"registers": 32768}):
        assert cost(tiling, *shape, of(90, **limits)) > 1.3 * together, limits


@pytest.mark.parametrize(
    ("block", "limits", "resident"),
    [
        ((256, 128, 0), {}, 2),
        ((256, 129, 0), {}, 1),
        ((64, 128, 0), {}, 8),
        ((1024, 32, 0), {}, 2),
        ((32, 32, 0), {}, 32),
        ((128, 32, 48 << 10), {}, 4),
        ((128, 32, 227 << 10), {}, 1),
        ((128, 32, 300 << 10), {}, 1),
        ((128, 40, 48 << 10), {"shared": 100 << 10, "threads": 1536, "blocks": 16}, 2),
    ],
)
def test_occupancy_follows_threads_registers_and_shared_memory(block, limits, resident):
    """As NVIDIA's occupancy tables have it, of compute capability 9.0 and, the last one, 8.6."""
    assert H100._replace(**limits).resident(*block) == resident


@pytest.mark.parametrize("a", [FLOATS, BRAINS], ids=["ordinary units", "tensor cores"])
def test_no_product_of_a_gpt_2_leaves_the_rounds_of_a_large_gpu_half_empty(a):
    """Rows of 8 sequences of 1024 tokens, forward, input halves and weight halves."""
    tokens, width = 8192, 768
    for wide in (width, 3 * width, 4 * width, 50257):
        for m, n, k in ((tokens, wide, width), (tokens, width, wide), (wide, width, tokens)):
            tile, splits = MeasuredTiles().tiling(a, "NT", (m, n, k, 1), of(90))
            blocks = count(m, tile.TILE_M) * count(n, tile.TILE_N) * splits
            least = 0.7 if a is BRAINS else 0.96
            assert blocks / (132 * count(blocks, 132)) >= least, (m, n, k)


def test_the_last_block_of_a_multiprocessor_costs_more_without_company():
    """Two rounds of two resident blocks, and three, of which the last has the multiprocessor for itself."""
    tile, engine = TENSOR_TILES[0], of(90)
    two, three, four = (
        cost(Tiling(tile, 1), 128 * 132, 128 * rounds, 4096, 1, engine) for rounds in (2, 3, 4)
    )
    assert (three - two) / tile.step > 1.25 * 4096
    assert (four - three) / tile.step < 0.75 * 4096


@pytest.mark.parametrize("capability", [75, 80, 90])
def test_tiles_to_measure_include_split_sums_for_small_products(capability):
    for a in (FLOATS, HALVES, BRAINS):
        tilings = worth_measuring(a, 64, 64, 1024, of(capability))
        assert {tiling.tile for tiling in tilings} == {*possible(a, capability)}
        assert {tiling.splits for tiling in tilings} == {1, 2, 4, 8}
    by_warpgroups = worth_measuring(BRAINS, 64, 64, 1024, of(90), wgmma=True)
    assert {tiling.tile for tiling in by_warpgroups} == {*HOPPER_TILES}
    long = worth_measuring(FLOATS, 8192, 768, 50257, of(90), True)
    assert {tiling.splits for tiling in long} == {7}
    large = worth_measuring(FLOATS, 8192, 8192, 8192, of(capability))
    assert all(tiling.splits == 1 for tiling in large if tiling.tile == TILES[2])


def test_a_file_says_what_was_written_and_nothing_else_is_read(tmp_path):
    path = tmp_path / "tiles.json"
    write_tiles(path, "a device", FOUND)
    assert read_tiles(path).measured == tuple(FOUND)
    assert [entry.tiling.tile.kernel for entry in read_tiles(path).measured].count("gemm") == 2
    assert read_tiles(path).measured[-1].tiling.tile.itemsize == 4
    for text, complaint in (
        ("{}", "is no table of tiles"),
        ("[", "is no table of tiles"),
        (
            path.read_text().replace("gemm_tensor", "gemm_other"),
            "is no table of tiles: of 'measured",
        ),
        (path.read_text().replace("64,", "63,"), "no kernel takes"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            read_tiles(path)
    with pytest.raises(ConfigError, match=r"missing\.json"):
        read_tiles(tmp_path / "missing.json")


@pytest.mark.parametrize(
    "tiling",
    [
        [],
        [[128, 128, 8, 8, 8]],
        [[128.0, 128, 8, 8, 8], 1],
        [[128, 128, 8, 8, 8], True],
        [[128, 128, 8, 8, 8], 33],
        [[128, 128, 8, 8, 8], 0],
        None,
    ],
)
def test_a_tiling_that_cannot_be_launched_is_refused_when_it_is_read(tiling, tmp_path):
    path = tmp_path / "tiles.json"
    entry = {
        "elements": "float32",
        "stored": "NT",
        "m": 4,
        "n": 4,
        "k": 4,
        "kernel": "gemm",
        "plan": tiling,
    }
    path.write_text(json.dumps({"measured": [entry]}))
    with pytest.raises(ConfigError, match="is no table of"):
        read_tiles(path)
