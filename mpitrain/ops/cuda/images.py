"""Convolution as tiled matrix product, and max-pooling, of images with channels last.

A kernel copies the windows of a tile of pixels into a matrix (im2col). `multiply`, a function of
product.py, multiplies it. B images, H rows, W columns, C channels; N output channels.
"""

from collections.abc import Iterator
from typing import Any

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.elements import KINDS
from mpitrain.ops.cuda.grids import ROWS, row_blocks
from mpitrain.ops.cuda.linear import Multiply
from mpitrain.ops.cuda.sums import sum_rows

TILE_BYTES = 32 << 20
"""Bytes of the windows of a tile: enough rows to fill a GPU with one product."""


def conv2d(kernels: Kernels, multiply: Multiply, x, w, b, side, arena):
    """Return (y, saved) with y = windows of x times w^T, plus b."""
    return _convolved(kernels, multiply, x, w, b, side, arena), x


def conv2d_backward_input(kernels: Kernels, multiply: Multiply, dy, w, side, arena):
    """Return dx: the convolution of dy with the kernel turned by 180 degrees, its channels swapped."""
    outputs, channels = len(w), w.shape[1] // side**2
    turned = arena.take((channels, side * side * outputs), w.dtype)
    kernels.launch(
        "turned_kernels",
        row_blocks(outputs * side**2),
        ROWS,
        (outputs * side**2, outputs, channels, side, w, turned),
        macros=KINDS[w.dtype].macros,
        fresh="turned",
    )
    return _convolved(kernels, multiply, dy, turned, None, side, arena)


def conv2d_backward_weight(
    kernels: Kernels, multiply: Multiply, dy, saved, dw, side, accumulate, arena
):
    """Write or add dw = dy^T times the windows of x, tile by tile."""
    pulls = dy.reshape(-1, dy.shape[-1])
    for rows, windows in _tiles(kernels, saved, side, arena):
        beta = float(accumulate or rows.start > 0)
        multiply(kernels, arena, pulls[rows], windows, dw, transposed_a=True, beta=beta)


def conv2d_backward_bias(kernels: Kernels, dy, db, accumulate, arena):
    """Write or add db, the sum of dy over images, rows and columns."""
    sum_rows(kernels, dy.reshape(-1, dy.shape[-1]), db, accumulate, arena)


def max_pool(kernels: Kernels, x, size, arena):
    """Return (y, saved) with the largest number of each window, and its number in the window."""
    images, rows, columns, channels = x.shape
    shape = images, rows // size, columns // size, channels
    y, winners = arena.take(shape, x.dtype), arena.take(shape, "uint8")
    kernels.launch(
        "max_pool",
        row_blocks(y.size // channels),
        ROWS,
        (y.size // channels, rows, columns, channels, size, x, y, winners),
        macros=KINDS[x.dtype].macros,
        fresh="y winners",
    )
    return y, (winners, x.shape)


def max_pool_backward(kernels: Kernels, dy, saved, size, arena):
    """Return dx: dy at the largest number of each window, elsewhere 0."""
    winners, shape = saved
    dx = arena.take(shape, dy.dtype)
    kernels.launch(
        "max_pool_backward",
        row_blocks(dx.size // shape[3]),
        ROWS,
        (dx.size // shape[3], *shape[1:], size, dy, winners, dx),
        macros=KINDS[dy.dtype].macros,
        fresh="dx",
    )
    return dx


def _convolved(kernels: Kernels, multiply: Multiply, x, w, b, side, arena):
    """Return x's windows times w^T, plus b.    w: (N, S S C); result: (B, H, W, N)"""
    y = arena.take((*x.shape[:3], len(w)), x.dtype)
    flat = y.reshape(-1, len(w))
    for rows, windows in _tiles(kernels, x, side, arena):
        multiply(kernels, arena, windows, w, flat[rows], transposed_b=True, bias=b)
    return y


def _tiles(kernels: Kernels, x: Any, side: int, arena: Any) -> Iterator[tuple[slice, Any]]:
    """Yield (rows of the flat output, windows (rows, S S C)) of each tile; without images, of none.

    The next tile overwrites the windows. x: (B, H, W, C), or a view of a contiguous (B, C, H, W).
    """
    images, height, width, channels = x.shape
    pixels, length = images * height * width, side * side * channels
    most = max(1, TILE_BYTES // (length * x.itemsize))
    windows = arena.take((min(pixels, most), length), x.dtype)
    # A kernel takes whole arrays, and these strides.
    stored = x if x.flags.c_contiguous else x.transpose(0, 3, 1, 2)
    steps = [step // x.itemsize for step in x.strides]
    for first in range(0, max(1, pixels), most):
        tile = windows[: min(most, pixels - first)]
        kernels.launch(
            "image_windows",
            row_blocks(len(tile)),
            ROWS,
            (len(tile), first, height, width, channels, side, *steps, stored, tile),
            macros=KINDS[x.dtype].macros,
            fresh="windows",
        )
        yield slice(first, first + len(tile)), tile
