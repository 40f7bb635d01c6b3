"""A mixture of experts: choices, rows sorted by expert, weighted sums, and products of each expert's rows."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.machine.backend import Arena
from mpitrain.ops.cuda import product, tiles
from mpitrain.ops.device import cuda_ops, reference_ops
from tests.cases.numbers import assert_close, numbers, stored, values

reference = reference_ops()


def sums_of(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def check_choice(
    kernels: Kernels, b: int, t: int, experts: int, k: int, before: int, dtype: str = "float32"
) -> None:
    """The choice, with ties and a NaN, and its gradient with both terms and without, stored in a dtype."""
    ops, arena, kind = cuda_ops(kernels), Arena(), sums_of(dtype)
    logits = stored(numbers(1, b * t, experts), kind)
    logits[::3] = np.round(logits[::3])
    weights, chosen, saved = ops.choose(logits, k, before, arena)
    true_weights, true_chosen, truth = reference.choose(values(logits), k, before, None)
    np.testing.assert_array_equal(chosen, true_chosen)
    assert_close(weights, true_weights, kind, "weights")
    load = np.random.default_rng(2).integers(9, size=(b, 1 + k % 2, experts))
    dweights, weight = stored(numbers(3, b * t, k), kind), stored(numbers(4, b, 1), kind)
    for given in (weight, None):
        dlogits, expected = np.empty(logits.shape, dtype), np.empty(logits.shape)
        terms = 0.5, 0.25, before
        ops.choose_backward(dweights, saved, load, given, *terms, dlogits, arena)
        weighted = None if given is None else values(given)
        reference.choose_backward(values(dweights), truth, load, weighted, *terms, expected, None)
        assert_close(dlogits, expected, dtype, "dlogits")
    if len(logits):
        logits[0, 0] = np.nan
        assert sorted(ops.choose(logits, experts, before, arena)[1][0]) == [*range(experts)]


def check_rows(
    kernels: Kernels,
    b: int,
    t: int,
    experts: int,
    k: int,
    c: int,
    capacity: int,
    dtype: str = "float32",
    shifted: bool = False,
) -> None:
    """Rows in the order of their experts and back, with weights and without; the tally of all choices."""
    ops, arena = cuda_ops(kernels), Arena()
    chosen = np.argsort(numbers(1, b * t, experts))[:, :k].copy()
    # The first of two ranks in a ring has two chunks of each sequence, where these can be halved.
    own = 1 + (t % 2 == 0)
    load = ops.count_choices(chosen, experts, b, own, arena)
    np.testing.assert_array_equal(load, reference.count_choices(chosen, experts, b, own, None))
    loads = np.random.default_rng(2).integers(3, size=(b, 4, experts))
    first, last = (0, 3) if own == 2 else (1, 1)
    loads[:, [first, last][:own]] = load
    given = chosen, loads, first, last, capacity
    places, sources, ends = ops.permute(*given, arena)
    for mine, truth in zip((places, sources, ends), reference.permute(*given, None), strict=True):
        np.testing.assert_array_equal(mine, truth)
    tally = np.arange(2 * experts).reshape(2, experts)
    expected = tally.copy()
    ops.add_load(load, ends, tally, arena)
    reference.add_load(load, ends, expected, None)
    np.testing.assert_array_equal(tally, expected)
    x, dy = (stored(numbers(seed, b * t, c), dtype, shifted) for seed in (1, 2))
    rows, weights = (
        stored(numbers(3, b * t * k, c), dtype, shifted),
        stored(numbers(4, b * t, k), sums_of(dtype)),
    )
    for given in (weights, None):
        weighted = None if given is None else values(given)
        assert_close(
            ops.dispatch(x, sources, k, arena, given),
            reference.dispatch(values(x), sources, k, None, weighted),
            dtype,
            "rows",
        )
        y, saved = ops.combine(rows, places, given, arena)
        true_y, truth = reference.combine(values(rows), places, weighted, None)
        assert_close(y, true_y, dtype, "y")
        if given is not None:
            dweights = ops.combine_backward(dy, saved, arena)
            assert dweights.dtype == weights.dtype
            assert_close(dweights, reference.combine_backward(values(dy), truth, None), dtype)


def check_products(
    kernels: Kernels,
    counts: list[int],
    nobody: int,
    n: int,
    k: int,
    tile: Any,
    dtype: str = "float32",
    result: str = "",
    by_library: bool = False,
) -> None:
    """Products of each expert's rows, and what they add to the gradients; rows of nobody are 0."""
    rows, groups, ends = sum(counts) + nobody, len(counts), np.cumsum(counts)
    x, w, dy = (
        stored(numbers(seed, *shape), dtype)
        for seed, shape in enumerate([(rows, k), (groups, n, k), (rows, n)])
    )
    multiply = (
        product.library if by_library else partial(product.gemm, tiling=tiles.Tiling(tile, 1))
    )
    ops, arena = cuda_ops(kernels, multiply), Arena()
    y, saved = ops.grouped_linear(x, w, ends, arena)
    true_y, truth = reference.grouped_linear(values(x), values(w), ends, None)
    assert_close(y, true_y, dtype, "y")
    dx, pending = ops.grouped_linear_backward_input(dy, w, saved, arena)
    true_dx, truth = reference.grouped_linear_backward_input(values(dy), values(w), truth, None)
    assert_close(dx, true_dx, dtype, "dx")
    for accumulate in (False, True):
        dw = stored(numbers(4, groups, n, k), result or dtype)
        expected = values(dw)
        ops.grouped_linear_backward_weight(pending, dw, accumulate, arena)
        reference.grouped_linear_backward_weight(truth, expected, accumulate, None)
        assert_close(dw, expected, dtype, "dw")


def choices() -> Iterator[partial]:
    """experts."""
    for before in (0, 1):
        for b, t, experts, k in ((1, 1, 1, 1), (2, 5, 7, 3), (3, 1, 70, 40), (0, 3, 2, 1)):
            yield partial(check_choice, b=b, t=t, experts=experts, k=k, before=before)
        for dtype in ("float64", "float16", "bfloat16"):
            yield partial(check_choice, b=2, t=3, experts=33, k=2, before=before, dtype=dtype)
    for b, t, experts, k, c, capacity in (
        (1, 1, 1, 1, 1, 9),
        (2, 5, 7, 3, 11, 99),
        (2, 40, 5, 2, 130, 7),
        (3, 17, 140, 4, 8, 1),
        (1, 70, 2, 1, 4, 64),
        (0, 3, 34, 1, 4, 2),
    ):
        yield partial(check_rows, b=b, t=t, experts=experts, k=k, c=c, capacity=capacity)
    for dtype in ("float64", "float16", "bfloat16"):
        yield partial(
            check_rows, b=2, t=3, experts=4, k=2, c=264, capacity=2, dtype=dtype, shifted=True
        )
        yield partial(check_rows, b=2, t=3, experts=4, k=2, c=272, capacity=9, dtype=dtype)


def grouped() -> Iterator[partial]:
    """gemm."""
    small, others = tiles.TILES[2], tiles.TILES[:2]
    of_small = small.TILE_M
    for counts, nobody in (
        ([1], 0),
        ([0, 5, 0, 0, of_small, 2 * of_small + 3, 0], 0),
        ([3, 0, 33], of_small + 1),
        ([0, 0], 2),
        ([of_small, of_small], 0),
        ([0, 0], 0),
        ([1] * 9, 0),
    ):
        yield partial(check_products, counts=counts, nobody=nobody, n=33, k=20, tile=small)
    for tile in others:
        counts = [tile.TILE_M + 1, 0, 3]
        yield partial(check_products, counts=counts, nobody=1, n=tile.TILE_N + 1, k=9, tile=tile)
    for dtype in ("float64", "float16"):
        ways = {"dtype": dtype, "result": sums_of(dtype)}
        yield partial(check_products, counts=[5, 0, 33], nobody=2, n=12, k=8, tile=small, **ways)


def grouped_tensor() -> Iterator[partial]:
    """gemm_tensor."""
    small, small_float = tiles.TENSOR_TILES[2], tiles.FLOAT_TILES[-1]
    for counts, nobody in (
        ([0, 5, 0, small.TILE_M, 2 * small.TILE_M + 3, 0], 0),
        ([3, 0, 33], small.TILE_M + 1),
        ([0, 0], 2),
    ):
        for n, k in ((40, 48), (33, 21)):
            here = partial(check_products, counts=counts, nobody=nobody, n=n, k=k)
            yield partial(here, tile=small, dtype="bfloat16", result="float32")
            yield partial(here, tile=small_float)
    yield partial(check_products, counts=[9, 0, 7], nobody=1, n=16, k=8, tile=None, by_library=True)
