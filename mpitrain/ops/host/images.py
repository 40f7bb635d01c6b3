"""Convolution as tiled matrix product, and max-pooling, of images with channels last.

A tile is a band of rows of one image, or several images. Its windows become the rows of a matrix
(im2col) that stays in cache. A matrix of all windows is never in memory.
B images, H rows, W columns, C channels; N output channels; S and P as in the definitions.
"""

from collections.abc import Iterator

import numpy as np

from mpitrain.ops.host.blocks import rounds, sum_rows
from mpitrain.ops.host.product import put_product
from mpitrain.ops.weightless import has_memory

TILE_BYTES = 1 << 20
"""Bytes of the windows of a tile: BLAS packs the kernel anew for each tile."""


def conv2d(x, w, b, side, arena):
    """Return (y, saved).    x: (B, H, W, C); w: (N, S S C); b: (N,) or None; y: (B, H, W, N)"""
    return _convolved(x, w.T, b, side, arena), x


def conv2d_backward_input(dy, w, side, arena):
    """Return dx: the convolution of dy with the kernel turned by 180 degrees, its channels swapped."""
    outputs, channels = len(w), w.shape[1] // side**2
    turned = arena.take((side, side, outputs, channels), w.dtype)
    taps = w.reshape(outputs, side, side, channels)[:, ::-1, ::-1]
    turned[...] = taps.transpose(1, 2, 0, 3)
    return _convolved(dy, turned.reshape(-1, channels), None, side, arena)


def conv2d_backward_weight(dy, saved, dw, side, accumulate, arena):
    """Write or add dw, tile by tile.    dy: (B, H, W, N); dw: (N, S S C)"""
    pulls = dy.reshape(-1, dy.shape[-1])
    if not (accumulate or len(pulls)):
        dw[...] = 0
    for rows, windows in _tiles(saved, side, arena):
        put_product(pulls[rows].T, windows, dw, accumulate, arena)
        accumulate = True


def conv2d_backward_bias(dy, db, accumulate, arena):
    """Write or add db.    dy: (B, H, W, N); db: (N,)"""
    sum_rows(dy.reshape(-1, dy.shape[-1]), db, accumulate, arena)


def max_pool(x, size, arena):
    """Return (y, saved).    x: (B, H, W, C); y: (B, H // P, W // P, C)"""
    images, rows, columns, channels = x.shape
    shape = images, rows // size, columns // size, channels
    y, winners = arena.take(shape, x.dtype), arena.take(shape, np.uint8)
    is_larger = arena.take(shape, np.bool_)
    y[...] = _candidates(x, shape, size, 0)
    winners.fill(0)
    for number in range(1, size * size):
        other = _candidates(x, shape, size, number)
        np.greater(other, y, out=is_larger)
        np.copyto(winners, number, where=is_larger)
        np.maximum(y, other, out=y)
    return y, (winners, x.shape)


def max_pool_backward(dy, saved, size, arena):
    """Return dx, of the shape of x."""
    winners, shape = saved
    dx, is_winner = arena.take(shape, dy.dtype), arena.take(dy.shape, np.bool_)
    dx[:, dy.shape[1] * size :] = 0
    dx[:, :, dy.shape[2] * size :] = 0
    for number in range(size * size):
        np.equal(winners, number, out=is_winner)
        np.multiply(dy, is_winner, out=_candidates(dx, dy.shape, size, number))
    return dx


def _candidates(x, shape, size, number):
    """Return a strided view of x: the element with this number in each window. Its shape is y's."""
    row, column = divmod(number, size)
    return x[:, row : shape[1] * size : size, column : shape[2] * size : size]


def _convolved(x, kernel, b, side, arena):
    """Return x's windows times the kernel, plus b.    kernel: (S S C, N); result: (B, H, W, N)"""
    y = arena.take((*x.shape[:3], kernel.shape[1]), x.dtype)
    flat = y.reshape(-1, kernel.shape[1])
    for rows, windows in _tiles(x, side, arena):
        put_product(windows, kernel, flat[rows], False, arena)
        if b is not None:
            flat[rows] += b
    return y


def _tiles(x, side, arena) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield (rows of the flat output, windows (rows, S S C)) of each tile.

    The next tile overwrites the windows. x: (B, H, W, C), with any strides.
    """
    images, height, width, channels = x.shape
    if not images:
        return
    band = max(1, TILE_BYTES // (width * side * side * channels * x.itemsize))
    together, band = min(images, max(1, band // height)), min(band, height)
    around = arena.take((together, band + side - 1, width + side - 1, channels), x.dtype)
    windows = arena.take((together * band * width, side * side * channels), x.dtype)
    corners = [
        (image, top) for image in range(0, images, together) for top in range(0, height, band)
    ]
    for number in rounds(len(corners), x):
        image, top = corners[number]
        count, rows = min(together, images - image), min(band, height - top)
        first = (image * height + top) * width
        tile = windows[: count * rows * width]
        if has_memory(x):
            _copy_windows(x[image : image + count], top, rows, side, around[:count], tile)
        yield slice(first, first + len(tile)), tile


def _copy_windows(x, top, rows, side, around, windows):
    """Copy the windows of rows `top` on, by an image with zeros around it.

    x: (n, H, W, C); around: (n, rows + S - 1 or more, W + S - 1, C); windows: (n rows W, S S C)
    """
    (_, height, width, channels), border = x.shape, side // 2
    first, end = max(0, top - border), min(height, top + rows + border)
    around.fill(0)
    shift = border - top
    around[:, first + shift : end + shift, border : border + width] = x[:, first:end]
    step_n, step_h, step_w, step_c = around.strides
    view = np.lib.stride_tricks.as_strided(
        around,
        (len(x), rows, width, side, side, channels),
        (step_n, step_h, step_w, step_h, step_w, step_c),
        writeable=False,
    )
    np.copyto(windows.reshape(view.shape), view)
