"""The definition of the operations of images: convolution and max-pooling.

B images, H rows, W columns, C channels, which come last; N output channels. A kernel has S rows and
S columns, S odd; a pooling window has P rows and P columns.
"""

import numpy as np


def conv2d(x, w, b, side, arena):
    """Return (y, saved): the convolution with zeros around the image, as padding="same" of PyTorch.

    x: (B, H, W, C); w: (N, S S C), by row, column and channel; b: (N,) or None; y: (B, H, W, N)

    The channels, or the rows and columns, of x are contiguous, so x may be a view of (B, C, H, W).
    side  S
    """
    (_, rows, columns, _), around = x.shape, _surrounded(x, side)
    y = sum(
        around[:, i : i + rows, j : j + columns] @ tap.T for i, j, tap in _taps(w, side, x.shape[3])
    )
    return y if b is None else y + b, x


def conv2d_backward_input(dy, w, side, arena):
    """Return dx, (B, H, W, C).    dy: (B, H, W, N); w: (N, S S C)"""
    images, rows, columns, _ = dy.shape
    channels, border = w.shape[1] // side**2, side // 2
    around = np.zeros((images, rows + 2 * border, columns + 2 * border, channels), dy.dtype)
    for i, j, tap in _taps(w, side, channels):
        around[:, i : i + rows, j : j + columns] += dy @ tap
    return around[:, border : border + rows, border : border + columns].copy()


def conv2d_backward_weight(dy, saved, dw, side, accumulate, arena):
    """Write or add dw.    dy: (B, H, W, N); dw: (N, S S C)"""
    (_, rows, columns, channels), around = saved.shape, _surrounded(saved, side)
    if not accumulate:
        dw[...] = 0
    for i, j, tap in _taps(dw, side, channels):
        tap += np.einsum("bhwn,bhwc->nc", dy, around[:, i : i + rows, j : j + columns])


def conv2d_backward_bias(dy, db, accumulate, arena):
    """Write or add db, the sum of dy over images, rows and columns.    db: (N,)"""
    db[...] = dy.sum((0, 1, 2)) + (db if accumulate else 0)


def max_pool(x, size, arena):
    """Return (y, saved): the largest number of each window; rows and columns that fill none count not.

    x: (B, H, W, C); y: (B, H // P, W // P, C)
    size  P, at most 16
    """
    images, rows, columns, channels = x.shape
    shape = images, rows // size, columns // size, channels
    windows = x[:, : shape[1] * size, : shape[2] * size]
    windows = windows.reshape(images, shape[1], size, shape[2], size, channels)
    windows = windows.swapaxes(2, 3).reshape(*shape[:3], size * size, channels)
    return windows.max(3), (windows.argmax(3), x.shape)


def max_pool_backward(dy, saved, size, arena):
    """Return dx: dy at the first largest number of each window, elsewhere 0."""
    winners, shape = saved
    dx = np.zeros(shape, dy.dtype)
    at = np.indices(dy.shape)
    dx[at[0], at[1] * size + winners // size, at[2] * size + winners % size, at[3]] = dy
    return dx


def _surrounded(x, side):
    border = side // 2
    return np.pad(x, ((0, 0), (border, border), (border, border), (0, 0)))


def _taps(w, side, channels):
    """Yield (row, column, view (N, C)) of a kernel's elements."""
    taps = w.reshape(len(w), side, side, channels)
    for i in range(side):
        for j in range(side):
            yield i, j, taps[:, i, j]
