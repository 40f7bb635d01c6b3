"""Images: the windows of a convolution as rows of a product, and max-pooling."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.machine.backend import Arena
from mpitrain.ops.cuda import layers
from mpitrain.ops.device import cuda_ops, reference_ops
from tests.cases.layers import halves
from tests.cases.numbers import assert_close, numbers, stored, values
from tests.rows import replaced

reference = reference_ops()


def check_conv(
    kernels: Kernels,
    shape: tuple[int, int, int, int],
    outputs: int,
    side: int,
    dtype: str = "float32",
    planes: bool = False,
    tile: int = layers.TILE_BYTES,
) -> None:
    """A convolution, forward and backward, over one tile or many, of images with channels last or first."""
    ops, arena, channels = cuda_ops(kernels), Arena(), shape[3]
    x, w, b, dy = (
        stored(a, dtype)
        for a in (
            numbers(1, *shape),
            numbers(2, outputs, side * side * channels),
            numbers(3, outputs),
            numbers(4, *shape[:3], outputs),
        )
    )
    if planes:
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)
    with replaced(vars(layers), "TILE_BYTES", tile):
        y, saved = ops.conv2d(x, w, b, side, arena)
        assert_close(y, reference.conv2d(values(x), values(w), values(b), side, None)[0], dtype)
        truth = reference.conv2d_backward_input(values(dy), values(w), side, None)
        assert_close(ops.conv2d_backward_input(dy, w, side, arena), truth, dtype, "dx")
        for accumulate in (False, True):
            dw = stored(numbers(9, *w.shape), "float64" if dtype == "float64" else "float32")
            expected = values(dw)
            ops.conv2d_backward_weight(dy, saved, dw, side, accumulate, arena)
            reference.conv2d_backward_weight(
                values(dy), values(x), expected, side, accumulate, None
            )
            assert_close(dw, expected, dtype, "dw")
    halves(["conv2d_backward_bias"], ops, (dy,), (values(dy),), [(outputs,)], dtype)


def check_max_pool(
    kernels: Kernels, shape: tuple[int, int, int, int], size: int, dtype: str = "float32"
) -> None:
    """Max-pooling of windows with equal numbers, and its gradient; dx of pixels outside all windows is 0."""
    ops, arena = cuda_ops(kernels), Arena()
    x = stored(np.round(numbers(1, *shape)), dtype)
    y, saved = ops.max_pool(x, size, arena)
    truth, winners = reference.max_pool(values(x), size, None)
    np.testing.assert_array_equal(values(y), truth)
    dy = stored(numbers(2, *y.shape), dtype)
    expected = reference.max_pool_backward(values(dy), winners, size, None)
    np.testing.assert_array_equal(values(ops.max_pool_backward(dy, saved, size, arena)), expected)


def check_nan(kernels: Kernels) -> None:
    """A NaN is the largest number of its window, wherever it is."""
    x = np.ones((1, 2, 8, 1), np.float32)
    for window in range(4):
        x[0, window // 2, 2 * window + window % 2] = np.nan
    y, _ = cuda_ops(kernels).max_pool(x, 2, Arena())
    assert np.isnan(y).all()


def pictures() -> Iterator[Callable]:
    """Every kernel of images.cu."""
    for shape, outputs, side in (
        ((1, 1, 1, 1), 1, 1),
        ((2, 5, 7, 3), 4, 3),
        ((3, 2, 3, 2), 5, 5),
        ((0, 3, 3, 2), 2, 3),
        ((1, 8, 32, 1), 1, 1),
    ):
        for planes in (False, True):
            yield partial(check_conv, shape=shape, outputs=outputs, side=side, planes=planes)
    for dtype in ("float64", "float16", "bfloat16"):
        yield partial(check_conv, shape=(2, 5, 7, 3), outputs=4, side=3, dtype=dtype, planes=True)
    for tile in (1, 1000):
        yield partial(check_conv, shape=(2, 5, 7, 3), outputs=4, side=3, tile=tile)
    for shape, size in (
        ((2, 6, 4, 3), 2),
        ((1, 7, 5, 2), 3),
        ((2, 3, 9, 1), 1),
        ((0, 4, 4, 1), 2),
        ((1, 16, 16, 1), 16),
        ((1, 16, 16, 4), 2),
        ((1, 4, 4, 16), 2),
    ):
        yield partial(check_max_pool, shape=shape, size=size)
    for dtype in ("float64", "float16", "bfloat16"):
        yield partial(check_max_pool, shape=(2, 7, 5, 3), size=2, dtype=dtype)
    yield check_nan
