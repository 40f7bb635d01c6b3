"""Wire formats by themselves: names, selection."""

import numpy as np
import pytest

from mpitrain.collectives.lossy import tiles
from mpitrain.collectives.wire import CODECS, Wire, largest, parse_wire
from mpitrain.errors import ConfigError


def test_names_have_amounts_where_they_need_them():
    assert parse_wire("none") == Wire("none", 0)
    assert parse_wire("topk") == Wire("topk", 0.01)
    assert parse_wire("topk:0.1") == Wire("topk", 0.1)
    assert parse_wire("powersgd") == Wire("powersgd", 4)


@pytest.mark.parametrize("text", ["", "fp8", "fp16:2", "topk:0", "topk:1.5", "topk:x", "topk:nan", "topk:inf", "powersgd:0",
                                  "powersgd:1.5", "powersgd:inf"])
def test_other_names_are_refused(text):
    with pytest.raises(ConfigError, match="wire is one of none, fp16, bf16, int8, topk, powersgd"):
        parse_wire(text)


@pytest.mark.parametrize("count", [1, 7, 1000, 40_000, 300_001])
@pytest.mark.parametrize("part", [0.001, 0.01, 0.3, 1])
def test_largest_finds_what_sorting_finds(count, part):
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    k = int(np.ceil(part * count))
    found = largest(values, k)
    right = np.sort(np.abs(values))[::-1][:k]
    assert np.array_equal(np.sort(np.abs(values[found]))[::-1], right)
    assert len(set(found.tolist())) == k


def test_largest_copes_with_equal_and_with_hidden_elements():
    assert len(set(largest(np.ones(50_000, np.float32), 500).tolist())) == 500
    hidden = np.zeros(50_000, np.float32)
    hidden[1:100] = 1  # a sample of every twelfth element sees few of them
    assert np.array_equal(largest(hidden, 99), np.arange(1, 100))


def test_int8_of_zeros_is_zero():
    codec, values = CODECS["int8"], np.zeros(256, np.float32)
    coded = np.empty(codec.block_bytes, np.uint8)
    codec.encode(values, coded)
    codec.decode(coded, values)
    assert not values.any()


@pytest.mark.parametrize("rows, columns, count", [(128, 128, 1), (384, 128, 3), (128, 512, 4), (31, 17, 2), (5, 77, 15),
                                                  (1, 9, 1), (7, 1, 1), (0, 5, 1), (3, 0, 1)])
def test_tiles_are_nearly_square_and_cover_a_matrix_once(rows, columns, count):
    before, k = 3, 4
    flat = np.zeros(before + rows * columns + 2)
    cut = tiles(before, rows, columns)
    assert len(cut) == count
    for tile in cut:
        tile.of(flat)[:] += 1
    assert np.array_equal(flat[before:-2], np.ones(rows * columns)) and not flat[:before].any() and not flat[-2:].any()
    if min(rows, columns) > 1:
        assert max(max(t.rows, t.columns) / min(t.rows, t.columns) for t in cut) <= 2
        assert sum(k * (t.rows + t.columns) for t in cut) <= 2 * k * (rows + columns)
