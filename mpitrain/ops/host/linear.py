"""Matrix products with bias and activation.

M rows, K inputs, N outputs. What `saved` and `pending` hold: linear x and (dy, x); with an activation (x, the slope of
the activation at every element) and (dz, x), where z is the activation's input.
"""

import numpy as np

from mpitrain.ops.host.blocks import put_product, row_blocks, sum_rows
from mpitrain.ops.reference import GELU_CUBIC, GELU_SCALE


def linear(x, w, b, arena):
    y = arena.take((len(x), len(w)), x.dtype)
    for rows in row_blocks(y):
        _affine(x[rows], w, b, y[rows])
    return y, x


def linear_backward_input(dy, w, saved, arena):
    dx = arena.take(saved.shape, dy.dtype)
    np.matmul(dy, w, out=dx)
    return dx, (dy, saved)


def linear_backward_weight(pending, dw, accumulate, arena):
    dy, x = pending
    put_product(dy.T, x, dw, accumulate, arena)


def linear_backward_bias(pending, db, accumulate, arena):
    sum_rows(pending[0], db, accumulate, arena)


def linear_gelu(x, w, b, arena):
    y = arena.take((len(x), len(w)), x.dtype)
    slope = arena.take(y.shape, y.dtype)
    for rows in row_blocks(y):
        _affine(x[rows], w, b, y[rows])
        _gelu(y[rows], slope[rows], arena)
    return y, (x, slope)


def linear_gelu_backward_input(dy, w, saved, arena):
    x, slope = saved
    dx = arena.take(x.shape, dy.dtype)
    for rows in row_blocks(dy):
        slope[rows] *= dy[rows]
        np.matmul(slope[rows], w, out=dx[rows])
    return dx, (slope, x)


def linear_relu(x, w, b, arena):
    y = arena.take((len(x), len(w)), x.dtype)
    slope = arena.take(y.shape, y.dtype)
    for rows in row_blocks(y):
        _affine(x[rows], w, b, y[rows])
        np.greater(y[rows], 0, out=slope[rows])
        np.maximum(y[rows], 0, out=y[rows])
    return y, (x, slope)


linear_relu_backward_input = linear_gelu_backward_input


def _affine(x, w, b, y):
    np.matmul(x, w.T, out=y)
    if b is not None:
        y += b


def _gelu(z, slope, arena):
    """Replace z by gelu(z), and write gelu'(z).

    With h = (1 + tanh u) / 2 and u = z (c1 + c3 z^2): gelu = z h, and gelu' = h (1 + 2 (1 - h) z (c1 + 3 c3 z^2)).
    """
    h = arena.take(z.shape, z.dtype)
    np.multiply(z, z, out=slope)
    slope *= GELU_SCALE * GELU_CUBIC
    slope += GELU_SCALE
    np.multiply(slope, z, out=h)
    np.tanh(h, out=h)
    h *= 0.5
    h += 0.5
    slope *= 6
    slope -= 4 * GELU_SCALE
    slope *= z
    z *= h
    complement = np.subtract(1, h, out=arena.take(z.shape, z.dtype))
    slope *= complement
    slope += 1
    slope *= h
