"""The table of tiles: which tiling a shape gets, and what a file of tilings may hold."""

import json

import ml_dtypes
import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.ops.cuda.tiles import TENSOR_TILES, TILES, USUAL, Measured, Table, Tiling, read_tiles, worth_measuring, write_tiles

FLOATS, HALVES, BRAINS = np.zeros(1, np.float32), np.zeros(1, np.float16), np.zeros(1, ml_dtypes.bfloat16)
FOUND = [Measured("float32", "NT", 1024, 1024, 1024, Tiling(TILES[3], 1)),
         Measured("float32", "NT", 64, 64, 8192, Tiling(TILES[2], 8)),
         Measured("bfloat16", "NN", 1024, 1024, 1024, Tiling(TENSOR_TILES[4], 2))]


def test_a_shape_near_a_measured_one_gets_its_plan():
    table = Table(FOUND)
    assert table.tiling(FLOATS, "NT", (1024, 2048, 512, 1), 80) == Tiling(TILES[3], 1)
    assert table.tiling(FLOATS, "NT", (100, 33, 5000, 1), 80) == Tiling(TILES[2], 8)
    assert table.tiling(BRAINS, "NN", (1000, 1000, 1000, 1), 90) == Tiling(TENSOR_TILES[4], 2)


@pytest.mark.parametrize(("a", "stored", "shape", "capability"), [
    (FLOATS, "NT", (1024, 2049, 1024, 1), 80), (FLOATS, "NN", (1024, 1024, 1024, 1), 80),
    (FLOATS, "NT", (1024, 1024, 1024, 2), 80), (HALVES, "NT", (1024, 1024, 1024, 1), 80),
    (BRAINS, "NN", (1024, 1024, 1024, 1), 75), (FLOATS, "NT", (0, 3, 0, 1), 80),
])
def test_everything_else_is_planned_as_without_a_table(a, stored, shape, capability):
    assert Table(FOUND).tiling(a, stored, shape, capability) == Table().tiling(a, stored, shape, capability)


@pytest.mark.parametrize(("shape", "tiling"), [
    ((8192, 8192, 8192, 1), Tiling(TILES[0], 1)), ((1024, 1024, 1024, 1), Tiling(TILES[1], 1)),
    ((512, 512, 64, 1), Tiling(TILES[2], 1)), ((32, 32, 8192, 1), Tiling(TILES[2], 16)), ((0, 0, 0, 1), Tiling(TILES[2], 1)),
])
def test_without_a_table_the_largest_tile_that_fills_the_device_is_taken(shape, tiling):
    assert Table().tiling(FLOATS, "NT", shape, 80) == tiling
    assert tiling.tile in TILES[:USUAL]


@pytest.mark.parametrize("capability", [75, 80, 90])
def test_every_tile_is_worth_a_measurement_and_small_products_with_split_sums(capability):
    for a in (FLOATS, HALVES, BRAINS):
        tilings = worth_measuring(a, 64, 64, 1024, capability)
        assert len({tiling.tile for tiling in tilings}) == len(TENSOR_TILES if tilings[0].tile.kernel == "gemm_tensor" else TILES)
        assert {tiling.splits for tiling in tilings} == {1, 2, 4, 8}
    assert all(tiling.splits == 1 for tiling in worth_measuring(FLOATS, 8192, 8192, 8192, capability) if tiling.tile == TILES[2])


def test_a_file_says_what_was_written_and_nothing_else_is_read(tmp_path):
    path = tmp_path / "tiles.json"
    write_tiles(path, "a device", FOUND)
    assert read_tiles(path).measured == tuple(FOUND)
    for text, complaint in (("{}", "is no table of tiles"), ("[", "is no table of tiles"),
                            (path.read_text().replace("gemm_tensor", "gemm_other"), "is no table of tiles: KeyError"),
                            (path.read_text().replace("64,", "63,"), "no kernel takes")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            read_tiles(path)
    with pytest.raises(ConfigError, match=r"missing\.json cannot be read: No such file"):
        read_tiles(tmp_path / "missing.json")


@pytest.mark.parametrize("tiling", [[], [[128, 128, 8, 8, 8]], [[128.0, 128, 8, 8, 8], 1], [[128, 128, 8, 8, 8], True],
                                    [[128, 128, 8, 8, 8], 33], [[128, 128, 8, 8, 8], 0], None])
def test_a_tiling_that_cannot_be_launched_is_refused_when_it_is_read(tiling, tmp_path):
    path = tmp_path / "tiles.json"
    entry = {"elements": "float32", "stored": "NT", "m": 4, "n": 4, "k": 4, "kernel": "gemm", "plan": tiling}
    path.write_text(json.dumps({"measured": [entry]}))
    with pytest.raises(ConfigError, match="is no table of tiles"):
        read_tiles(path)
