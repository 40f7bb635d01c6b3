"""What the simulator imitates, against NumPy: 16-bit conversions, warp collectives, tensor cores, copies."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mpitrain.kernels.loader import Argument, Kernels
from mpitrain.kernels.simulator.machine import Simulator

ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)
BFLOAT16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "checked"])
def launch(request):
    kernels = Kernels(Simulator(checked=request.param), folder=Path(__file__).parent)
    # Not every kernel of the file uses Element; it is one library all the same.
    return lambda name, threads, *arguments, Element="__half": kernels.launch(
        name, (-(-threads // 256),), (min(threads, 256),), arguments, Element=Element
    )


def bfloat16_bits(x):
    """Round to nearest even in float64 arithmetic, independent of the bit tricks under test."""
    exponent = np.maximum(np.frexp(x.astype(np.float64))[1], -125)
    step = np.ldexp(1.0, exponent - 8)
    with np.errstate(over="ignore"):
        rounded = (np.rint(x.astype(np.float64) / step) * step).astype(np.float32)
    return (rounded.view(np.uint32) >> 16).astype(np.uint16)


def test_every_float16_and_bfloat16_converts_to_float32(launch):
    from_h, from_b = np.empty((2, 1 << 16), np.float32)
    float16 = ALL_16_BITS.view(np.float16)
    launch(
        "convert_from_16_bits",
        1 << 16,
        1 << 16,
        float16,
        ALL_16_BITS.view(BFLOAT16),
        Argument(from_h, fresh=True),
        Argument(from_b, fresh=True),
    )
    np.testing.assert_array_equal(from_h, float16.astype(np.float32))
    bits = from_b.view(np.uint32)
    np.testing.assert_array_equal(bits, ALL_16_BITS.astype(np.uint32) << 16)


def test_floats_round_to_16_bits_as_ieee_says(launch):
    rng = np.random.default_rng(1)
    ties = ALL_16_BITS.view(np.float16).astype(np.float32)
    ties = ties[np.isfinite(ties)]
    x = np.concatenate(
        [
            rng.integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32),
            ties,
            (ties[1:] + ties[:-1]) / 2,
            np.float32(
                [
                    0,
                    -0.0,
                    65519.9,
                    65520,
                    65536,
                    2**-24,
                    2**-25,
                    1.0001 * 2**-25,
                    3e38,
                    -np.inf,
                    np.inf,
                ]
            ),
        ]
    )
    x = x[~np.isnan(x)]
    h, b = np.empty(len(x), np.float16), np.empty(len(x), BFLOAT16)
    launch(
        "convert_to_16_bits", len(x), len(x), x, Argument(h, fresh=True), Argument(b, fresh=True)
    )
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(h.view(np.uint16), x.astype(np.float16).view(np.uint16))
    finite = np.isfinite(x)
    np.testing.assert_array_equal(b[finite].view(np.uint16), bfloat16_bits(x[finite]))


def test_nan_stays_nan(launch):
    h, b = np.empty(1, np.float16), np.empty(1, BFLOAT16)
    launch(
        "convert_to_16_bits",
        1,
        1,
        np.float32([np.nan]),
        Argument(h, fresh=True),
        Argument(b, fresh=True),
    )
    assert np.isnan(h[0]) and np.isnan(b[0])


def test_shuffles_move_values_as_cuda_documents(launch):
    x, y = np.arange(-7, 25, dtype=np.float32), np.empty((8, 32), np.float32)
    launch("shuffle", 32, x, Argument(y, fresh=True))
    lane = np.arange(32)
    up, down = np.where(lane < 3, lane, lane - 3), np.where(lane > 28, lane, lane + 3)
    sources = [np.full(32, 5), up, down, lane ^ 6, lane ^ 3]
    np.testing.assert_array_equal(y[:5], [x[source] for source in sources])
    np.testing.assert_array_equal(y[5:], np.array([[24], [0], [1]]) * np.ones(32))


@pytest.mark.product
@pytest.mark.parametrize("name", ["multiply_tile", "multiply_tile_sm75"])
def test_tensor_core_fragments_are_those_of_the_ptx_isa(launch, name):
    rng = np.random.default_rng(2)
    a, b = (
        rng.integers(-8, 9, (16, 16)).astype(np.float16),
        rng.integers(-8, 9, (16, 8)).astype(np.float16),
    )
    c = np.empty((16, 8), np.float32)
    launch(name, 32, a, b, Argument(c, fresh=True))
    np.testing.assert_array_equal(c, a.astype(np.float32) @ b.astype(np.float32))


def test_a_tensor_core_product_of_bfloat16_reads_bfloat16(launch):
    rng = np.random.default_rng(3)
    a, b = (
        rng.integers(-8, 9, (16, 16)).astype(np.float32),
        rng.integers(-8, 9, (16, 8)).astype(np.float32),
    )
    c = np.empty((16, 8), np.float32)
    launch(
        "multiply_tile",
        32,
        a.astype(BFLOAT16),
        b.astype(BFLOAT16),
        Argument(c, fresh=True),
        Element="__nv_bfloat16",
    )
    np.testing.assert_array_equal(c, a @ b)


@pytest.mark.product
@pytest.mark.parametrize("valid", [0, 4, 8, 16])
def test_a_copy_of_fewer_valid_bytes_fills_the_rest_with_zeros(launch, valid):
    x = np.arange(1, 5, dtype=np.float32)
    padded = np.zeros(8, np.float32)
    start = -padded.ctypes.data // 4 % 4
    padded[start : start + 4] = x
    y = np.empty(4, np.float32)
    launch("copy_in_part", 4, valid, padded[start : start + 4], Argument(y, fresh=True))
    np.testing.assert_array_equal(y, np.where(np.arange(4) < valid // 4, x, 0))


@pytest.mark.product
@pytest.mark.parametrize("exists", [0, 1])
def test_a_copy_of_what_does_not_exist_reads_nothing_and_writes_zeros(launch, exists):
    padded = np.zeros(12, np.float32)
    start = -padded.ctypes.data // 4 % 4
    x, y = padded[start : start + 5 * exists], np.empty(5, np.float32)
    x[...] = np.arange(1, x.size + 1)
    launch("copy_or_not", 5, exists, x, Argument(y, fresh=True))
    np.testing.assert_array_equal(y, np.arange(1, 6) * exists)
