"""Matrix products: gemm, gemm_combine, gemm_tensor, gemm_hopper."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.machine.backend import Arena
from mpitrain.ops.cuda import product, tiles
from mpitrain.ops.reference.layers import GELU_CUBIC, GELU_SCALE, product_3xtf32, split_tf32
from tests.cases.numbers import assert_close, numbers, stored, values

SHAPES = [
    (1, 1, 1),
    (0, 3, 2),
    (3, 0, 2),
    (4, 5, 0),
    (7, 129, 31),
    (31, 33, 17),
    (64, 96, 48),
    (65, 33, 130),
]
TRANSPOSITIONS = [(False, True), (False, False), (True, False), (True, True)]


def gelu(z: np.ndarray) -> np.ndarray:
    """The tanh form."""
    return 0.5 * z * (1 + np.tanh(GELU_SCALE * (z + GELU_CUBIC * z**3)))


def gelu_slope(z: np.ndarray) -> np.ndarray:
    """The derivative of the tanh form."""
    t = np.tanh(GELU_SCALE * (z + GELU_CUBIC * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t**2) * GELU_SCALE * (1 + 3 * GELU_CUBIC * z**2)


# Of what precedes the activation, and of what C held before.
ACTIVATIONS = {
    None: lambda z, _: z,
    "gelu": lambda z, _: gelu(z),
    "relu": lambda z, _: np.maximum(z, 0),
    "gelu backward": lambda z, held: z * gelu_slope(held),
}


def check(
    kernels: Kernels,
    m: int,
    n: int,
    k: int,
    *,
    dtype: str = "float32",
    result: str = "",
    ta: bool = False,
    tb: bool = False,
    tile: Any = None,
    splits: int = 1,
    extra: bool = False,
    gap: int | None = None,
    shifted: bool = False,
    activation: str | None = None,
    batch: int = 0,
    by_library: bool = False,
) -> None:
    """One product against NumPy.

    ta, tb   the operands are stored transposed
    extra    uses all that an epilogue can
    gap      columns by which the arrays are wider that those are cut out of; None: 3 with `extra`, else 0
    shifted  no array starts at an aligned address
    """
    result, lead = result or dtype, (batch,) if batch else ()

    def array(seed: int, rows: int, columns: int, kind: str) -> np.ndarray:
        wide = columns + (3 * extra if gap is None else gap)
        return stored(numbers(seed, *lead, rows, wide), kind, shifted)[..., :columns]

    a, b = (
        array(1, *((k, m) if ta else (m, k)), dtype),
        array(2, *((n, k) if tb else (k, n)), dtype),
    )
    c, saved, residual = array(3, m, n, result), array(4, m, n, result), array(5, m, n, result)
    op_a, op_b = (
        values(a).swapaxes(-1, -2) if ta else values(a),
        values(b).swapaxes(-1, -2) if tb else values(b),
    )
    alpha, beta, bias, row_sums = 1.0, 0.0, None, None
    truth, held = op_a @ op_b, values(c)
    if extra:
        alpha, beta, bias = 1.5, -0.5, stored(numbers(6, n), dtype, shifted)
        truth = alpha * truth + beta * held + values(bias)
        row_sums = (
            None
            if batch or by_library
            else numbers(7, m).astype("float64" if dtype == "float64" else "float32")
        )
        true_sums = op_a.sum(-1) + (0 if row_sums is None else beta * values(row_sums))
    multiply = (
        product.library
        if by_library
        else partial(product.gemm, tiling=tile and tiles.Tiling(tile, splits))
    )
    multiply(
        kernels,
        Arena(),
        a,
        b,
        c,
        transposed_a=ta,
        transposed_b=tb,
        alpha=alpha,
        beta=beta,
        bias=bias,
        residual=residual if extra else None,
        saved=saved if extra else None,
        activation=activation,
        row_sums=row_sums,
    )
    assert_close(
        c, ACTIVATIONS[activation](truth, held) + (values(residual) if extra else 0), result, "c"
    )
    if extra:
        assert_close(saved, truth, result, "saved")
    if row_sums is not None:
        assert_close(row_sums, true_sums, row_sums.dtype.name, "row sums")


def check_3xtf32(kernels: Kernels, m: int, n: int, k: int, ta: bool, tb: bool, tile: Any) -> None:
    """A float32 product on tensor cores has the accuracy of float32, and so has what it means."""
    a, b = (numbers(seed, *shape).astype("float32") for seed, shape in ((1, (m, k)), (2, (k, n))))
    c, truth = np.empty((m, n), "float32"), values(a) @ values(b)
    product.gemm(
        kernels,
        Arena(),
        a.T.copy() if ta else a,
        b.T.copy() if tb else b,
        c,
        transposed_a=ta,
        transposed_b=tb,
        tiling=tiles.Tiling(tile, 1),
    )
    one_tf32 = split_tf32(a)[0] @ split_tf32(b)[0]
    for result, least, most in (
        (c, 0, 5e-7),
        (product_3xtf32(a, b), 0, 1e-6),
        (one_tf32, 1e-4, 1e-3),
    ):
        assert least <= np.abs(result - truth).max() / np.abs(truth).max() <= most


def check_combine(kernels: Kernels, m: int, n: int, blocks: int) -> None:
    """Two parts of a product and of its row sums, added by so few blocks that each thread has several runs."""
    parts, c, row_sums = (
        numbers(1, 2, m * (n + 1)).astype("float32"),
        np.empty((m, n), "float32"),
        np.empty(m, "float32"),
    )
    kernels.launch(
        "gemm_combine",
        (blocks,),
        (256,),
        (m, n, 1.0, 0.0, c, n, 0, None, None, None, row_sums, 2, parts),
        fresh="C row_sums",
        strided="C",
        Element="float",
        Result="float",
        Sum="float",
        ROW_SUMS=1,
        **product.NO_EPILOGUE,
    )
    truth = values(parts).sum(0)
    assert_close(c, truth[: m * n].reshape(m, n), what="c")
    assert_close(row_sums, truth[m * n :], what="row sums")


def ordinary() -> Iterator[partial]:
    """gemm and gemm_combine."""
    large, medium, small, *others = tiles.TILES
    for ta, tb in TRANSPOSITIONS:
        here = partial(check, ta=ta, tb=tb)
        for m, n, k in SHAPES:
            yield partial(here, m=m, n=n, k=k, tile=small)
        backward = "gelu backward" if tb and not ta else None
        yield partial(here, m=33, n=36, k=20, tile=small, shifted=True, activation=backward)
        if tb and not ta:  # epilogues and splits do not know how the operands are stored
            yield partial(here, m=31, n=45, k=50, tile=small, extra=True, activation="gelu")
            yield partial(here, m=33, n=30, k=100, tile=small, splits=3, activation=backward)
        if not (ta and tb):
            tile = large if ta else medium
            m, n, k = tile.TILE_M + 1, tile.TILE_N - 1, 2 * tile.TILE_K + 1
            yield partial(here, m=m, n=n, k=k, tile=tile)
    for tile in others:
        yield partial(
            check,
            m=tile.TILE_M + 1,
            n=tile.TILE_N - 1,
            k=2 * tile.TILE_K + 1,
            tile=tile,
            extra=True,
            ta=True,
        )
    yield partial(
        check, m=33, n=30, k=100, tile=small, splits=4, extra=True, ta=True, activation="relu"
    )
    yield partial(check, m=3, n=5, k=20, tile=small, splits=5)  # more parts than tiles of K
    yield partial(check, m=33, n=17, k=20, tile=small, batch=3, extra=True)
    yield partial(check, m=20, n=17, k=70, tile=small, batch=2, splits=2)
    yield partial(check, m=2100, n=70, k=3, tile=small)  # more than one group of tiles
    yield partial(check, m=40, n=50, k=1100)  # tile and split of the library's own choice
    for m, n, blocks in ((600, 3, 1), (90, 67, 1), (37, 128, 2), (300, 1100, 1), (3, 0, 1)):
        yield partial(check_combine, m=m, n=n, blocks=blocks)
    for n, dtype, activation in ((65, "float64", None), (35, "float16", "gelu backward")):
        yield partial(
            check, m=33, n=n, k=18, tile=small, dtype=dtype, extra=True, activation=activation
        )


def by_library() -> Iterator[partial]:
    """The epilogue of gemm_combine after products that a library made."""
    for ta, tb in TRANSPOSITIONS:
        here = partial(check, ta=ta, tb=tb, by_library=True)
        for m, n, k in SHAPES:
            yield partial(here, m=m, n=n, k=k)
        yield partial(here, m=31, n=45, k=50, extra=True, activation="gelu")
        yield partial(here, m=32, n=48, k=20, extra=True, activation="relu")
        yield partial(here, m=32, n=47, k=20, activation="gelu backward")
        yield partial(here, m=3, n=4, k=0, extra=True)
        yield partial(here, m=33, n=36, k=20, shifted=True)
    for dtype in ("float64", "float16", "bfloat16"):
        yield partial(check, m=33, n=36, k=18, dtype=dtype, extra=True, ta=True, by_library=True)
        yield partial(check, m=33, n=35, k=18, dtype=dtype, tb=True, by_library=True)


def tensor() -> Iterator[partial]:
    """gemm_tensor."""
    large, medium, small, _, tall, *_ = tiles.TENSOR_TILES
    for ta, tb in TRANSPOSITIONS:
        here = partial(check, ta=ta, tb=tb, dtype="float16", result="float32", tile=small)
        for m, n, k in [*SHAPES, (32, 40, 200)]:
            yield partial(here, m=m, n=n, k=k)
        backward = "gelu backward" if tb and not ta else None
        yield partial(here, m=40, n=40, k=40, shifted=True, activation=backward)
        if tb and not ta:
            yield partial(here, m=31, n=45, k=50, extra=True, activation="gelu", result="float16")
            yield partial(here, m=40, n=30, k=200, splits=3, activation=backward)
    for tile, result, ways in (
        (medium, "float32", {"tb": True}),
        (large, "float32", {"tb": True}),
        (tall, "float32", {"ta": True, "extra": True}),
        (tall, "bfloat16", {"tb": True}),
    ):  # one of those with warps of 64 x 64: each is long to compile
        yield partial(
            check,
            m=tile.TILE_M + 8,
            n=tile.TILE_N - 8,
            k=3 * tile.TILE_K + 8,
            tile=tile,
            dtype="bfloat16",
            result=result,
            **ways,
        )
    *others, small_float = tiles.FLOAT_TILES
    for ta, tb in TRANSPOSITIONS:
        here = partial(check, ta=ta, tb=tb, tile=small_float)
        for m, n, k in [*SHAPES, (32, 40, 200)]:
            yield partial(here, m=m, n=n, k=k)
        yield partial(check_3xtf32, m=24, n=36, k=768, ta=ta, tb=tb, tile=small_float)
    yield partial(check, m=40, n=30, k=200, tile=small_float, splits=3, extra=True, ta=True)
    for tile in others:
        yield partial(check, m=tile.TILE_M + 8, n=tile.TILE_N - 8, k=56, tile=tile, ta=True)
    yield partial(check, m=33, n=17, k=20, tile=small, dtype="bfloat16", batch=3, extra=True)
    yield partial(
        check,
        m=33,
        n=30,
        k=200,
        tile=small,
        dtype="float16",
        splits=4,
        extra=True,
        ta=True,
        activation="relu",
    )
    # Each part's row sums put the next one anywhere.
    yield partial(
        check,
        m=10,
        n=32,
        k=200,
        tile=small,
        dtype="float16",
        result="float32",
        splits=8,
        extra=True,
        ta=True,
    )


def check_hopper(kernels: Kernels, few: int = 0, **ways: Any) -> None:
    """A product by warpgroups, where the device has them.

    few  as if the device had so many multiprocessors, so that a block computes several tiles
    """
    engine = kernels.engine
    if not engine.has_wgmma:
        return
    multiprocessors = engine.multiprocessors
    try:
        engine.multiprocessors = few or multiprocessors
        check(kernels, **ways)
    finally:
        engine.multiprocessors = multiprocessors


def hopper() -> Iterator[partial]:
    """gemm_hopper: each form, ragged edges, an epilogue with all there is, split sums, pairs, several tiles a block."""
    large, pair, _, small = tiles.HOPPER_TILES
    brain = partial(check_hopper, dtype="bfloat16")
    for m, n, k in ((128, 128, 64), (136, 72, 200), (1, 1, 8), (136, 264, 328)):
        yield partial(brain, m=m, n=n, k=k, tb=True, tile=small, few=2)
    yield partial(brain, m=300, n=200, k=72, tile=large)
    whole = partial(
        brain, m=264, n=200, k=328, ta=True, tile=large, result="float32", extra=True, gap=8
    )
    yield partial(whole, splits=3)
    yield partial(brain, m=520, n=72, k=200, tile=pair, few=2)
    yield partial(brain, m=264, n=72, k=72, tb=True, tile=pair)
    yield partial(check_hopper, m=136, n=136, k=136, ta=True, tb=True, dtype="float16", tile=small)
    yield partial(
        brain, m=136, n=127, k=135, tb=True, tile=small, extra=True, gap=9, activation="gelu"
    )
    # What the epilogue reads comes ahead: ragged parts between whole ones, and several tiles in a block.
    ahead = partial(brain, m=200, n=191, k=71, tb=True, tile=small, few=1, gap=9)
    yield partial(ahead, activation="gelu backward")
