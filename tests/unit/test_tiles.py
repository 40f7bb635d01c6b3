"""The table of tiles: which plan a shape gets, and what a file of plans may hold."""

import json

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.ops.cuda.tiles import TENSOR_TILES, TILES, USUAL, Measured, Plan, Table, read_tiles, worth_measuring, write_tiles

FLOATS, HALVES, BITS = np.zeros(1, np.float32), np.zeros(1, np.float16), np.zeros(1, np.uint16)
FOUND = [Measured("float32", "NT", 1024, 1024, 1024, Plan(TILES[3], 1)),
         Measured("float32", "NT", 64, 64, 8192, Plan(TILES[2], 8)),
         Measured("bfloat16", "NN", 1024, 1024, 1024, Plan(TENSOR_TILES[4], 2))]


def test_a_shape_near_a_measured_one_gets_its_plan():
    table = Table(FOUND)
    assert table.plan(FLOATS, "NT", (1024, 2048, 512, 1), 80) == Plan(TILES[3], 1)
    assert table.plan(FLOATS, "NT", (100, 33, 5000, 1), 80) == Plan(TILES[2], 8)
    assert table.plan(BITS, "NN", (1000, 1000, 1000, 1), 90) == Plan(TENSOR_TILES[4], 2)


@pytest.mark.parametrize(("a", "stored", "shape", "capability"), [
    (FLOATS, "NT", (1024, 2049, 1024, 1), 80), (FLOATS, "NN", (1024, 1024, 1024, 1), 80),
    (FLOATS, "NT", (1024, 1024, 1024, 2), 80), (HALVES, "NT", (1024, 1024, 1024, 1), 80),
    (BITS, "NN", (1024, 1024, 1024, 1), 75), (FLOATS, "NT", (0, 3, 0, 1), 80),
])
def test_everything_else_is_planned_as_without_a_table(a, stored, shape, capability):
    assert Table(FOUND).plan(a, stored, shape, capability) == Table().plan(a, stored, shape, capability)


@pytest.mark.parametrize(("shape", "plan"), [
    ((8192, 8192, 8192, 1), Plan(TILES[0], 1)), ((1024, 1024, 1024, 1), Plan(TILES[1], 1)),
    ((512, 512, 64, 1), Plan(TILES[2], 1)), ((32, 32, 8192, 1), Plan(TILES[2], 16)), ((0, 0, 0, 1), Plan(TILES[2], 1)),
])
def test_without_a_table_the_largest_tile_that_fills_the_device_is_taken(shape, plan):
    assert Table().plan(FLOATS, "NT", shape, 80) == plan
    assert plan.tile in TILES[:USUAL]


@pytest.mark.parametrize("capability", [75, 80, 90])
def test_every_tile_is_worth_a_measurement_and_small_products_with_split_sums(capability):
    for a in (FLOATS, HALVES, BITS):
        plans = worth_measuring(a, 64, 64, 1024, capability)
        assert len({plan.tile for plan in plans}) == len(TENSOR_TILES if plans[0].tile.kernel == "gemm_tensor" else TILES)
        assert {plan.splits for plan in plans} == {1, 2, 4, 8}
    assert all(plan.splits == 1 for plan in worth_measuring(FLOATS, 8192, 8192, 8192, capability) if plan.tile == TILES[2])


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


@pytest.mark.parametrize("plan", [[], [[128, 128, 8, 8, 8]], [[128.0, 128, 8, 8, 8], 1], [[128, 128, 8, 8, 8], True],
                                  [[128, 128, 8, 8, 8], 33], [[128, 128, 8, 8, 8], 0], None])
def test_a_plan_that_cannot_be_launched_is_refused_when_it_is_read(plan, tmp_path):
    path = tmp_path / "tiles.json"
    entry = {"elements": "float32", "stored": "NT", "m": 4, "n": 4, "k": 4, "kernel": "gemm", "plan": plan}
    path.write_text(json.dumps({"measured": [entry]}))
    with pytest.raises(ConfigError, match="is no table of tiles"):
        read_tiles(path)
