"""Wire formats by themselves: names, coding, selection."""

import numpy as np
import pytest

from mpitrain.collectives.compression import tiles
from mpitrain.collectives.engine.arithmetic import BLOCK, CODECS, Wire, largest, parse_wire
from mpitrain.errors import ConfigError


def test_names_have_amounts_where_they_need_them():
    assert parse_wire("none") == Wire("none", 0)
    assert parse_wire("topk") == Wire("topk", 0.01)
    assert parse_wire("topk:0.1") == Wire("topk", 0.1)
    assert parse_wire("powersgd") == Wire("powersgd", 4)


@pytest.mark.parametrize(
    "text",
    ["", "fp8", "fp16:2"]
    + [f"topk:{amount}" for amount in ("0", "1.5", "x", "nan", "inf")]
    + [f"powersgd:{amount}" for amount in ("0", "1.5", "inf")],
)
def test_other_names_are_refused(text):
    with pytest.raises(ConfigError, match="fp16, bf16, int8,"):
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


def coded_and_back(name, values):
    """The bytes that whole blocks become, and the blocks that come of them."""
    codec, back = CODECS[name], np.empty_like(values)
    coded = np.empty(values.size // BLOCK * codec.block_bytes, np.uint8)
    codec.encode(values, coded)
    codec.decode(coded, back)
    return coded, back


@pytest.mark.parametrize("name", CODECS)
def test_zeros_are_zero(name):
    assert not coded_and_back(name, np.zeros(256, np.float32))[1].any()


MAGNITUDES = (1e-45, 1e-41, 1e-38, 1e-34, 1e-30, 1e-10, 1e-6, 1, 65504, 1e20, 7e37)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("blocks", [1, 131])
def test_fp16_has_11_bits_within_2_28_of_its_blocks_largest(blocks):
    rng = np.random.default_rng(blocks)
    normal = rng.standard_normal((blocks, BLOCK))
    spread = np.where(normal < 0, -1, 1) * 10.0 ** rng.uniform(-45, 38.5, normal.shape)
    for wanted in (
        *(normal * size for size in MAGNITUDES),
        spread,
        spread / 1e30,
        np.where(normal < 0, 0, normal),
    ):
        values = wanted.astype(np.float32)
        values[0, :4] = 0, -0.0, 1e-45, np.finfo(np.float32).max if wanted is spread else 0
        _, back = coded_and_back("fp16", values.reshape(-1))
        values, back = values.astype(float), back.reshape(blocks, -1).astype(float)
        assert np.isfinite(back).all()
        sizes = np.abs(values)
        largest = sizes.max(axis=1, keepdims=True)
        held = np.where(sizes > 2**-28 * largest, 2**-11 * sizes, 2**-38 * largest)
        assert (np.abs(back - values) <= held).all()


def test_fp16_rounds_as_numpy_does_and_scales_by_powers_of_two():
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(131 * BLOCK) * 10.0 ** rng.uniform(-14, 0, 131 * BLOCK)).astype(
        np.float32
    )
    values[:2048] = np.arange(2048) / 2.0 ** rng.integers(0, 40, 2048)
    coded, back = coded_and_back("fp16", values)
    scales, numbers = coded[: 4 * 131].view(np.float32), coded[4 * 131 :].view(np.float16)
    assert (np.frexp(scales)[0] == 0.5).all()
    scales = np.repeat(scales.astype(float), BLOCK)
    assert np.array_equal(numbers, (values / scales).astype(np.float16))
    assert np.array_equal(back, numbers * scales)
    assert (np.abs(numbers).reshape(131, -1).max(axis=1) >= 2.0**14).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["fp16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_number_that_is_not_finite_becomes_nan(name, bad):
    values = np.ones(3 * BLOCK, np.float32)
    values[BLOCK + 17] = bad
    _, back = coded_and_back(name, values)
    assert np.isnan(back).reshape(3, -1).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(back).reshape(3, -1).all(axis=1).tolist() == [True, False, True]


@pytest.mark.parametrize(
    "rows, columns, count",
    [
        *((128, 128, 1), (384, 128, 3), (128, 512, 4), (31, 17, 2), (5, 77, 15)),
        *((1, 9, 1), (7, 1, 1), (0, 5, 1), (3, 0, 1)),
    ],
)
def test_tiles_are_nearly_square_and_cover_a_matrix_once(rows, columns, count):
    before, k = 3, 4
    flat = np.zeros(before + rows * columns + 2)
    cut = tiles(before, rows, columns)
    assert len(cut) == count
    for tile in cut:
        tile.of(flat)[:] += 1
    assert (
        np.array_equal(flat[before:-2], np.ones(rows * columns))
        and not flat[:before].any()
        and not flat[-2:].any()
    )
    if min(rows, columns) > 1:
        assert max(max(t.rows, t.columns) / min(t.rows, t.columns) for t in cut) <= 2
        assert sum(k * (t.rows + t.columns) for t in cut) <= 2 * k * (rows + columns)
