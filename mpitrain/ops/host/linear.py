"""Matrix products with bias and activation.

M rows, K inputs, N outputs. What `saved` and `pending` hold: linear x and (dy, x); with an activation (x, the slope of
the activation at every element) and (dz, x), where z is the activation's input.
"""

import numpy as np

from mpitrain.ops.host.blocks import block_shape, row_blocks, sum_rows
from mpitrain.ops.host.product import put_product
from mpitrain.ops.reference import GELU_CUBIC, GELU_SCALE


def linear(x, w, b, arena, out=None, residual=None):
    """x: (M, K); w: (N, K); b: (N,) or None; y and the residual: (M, N)"""
    y = _product(x, w, arena, out)
    add_bias(y, b, y, arena, residual)
    return y, x


def add_bias(x, b, out, arena, residual=None):
    """x, residual and out: (..., N), in blocks of rows; b: (N,) or None"""
    for rows in row_blocks(out):
        sums, y = x[rows], out[rows]
        if b is not None:
            sums = np.add(sums, b, out=y)
        if residual is not None:
            sums = np.add(sums, residual[rows], out=y)
        if sums is not y and out is not x:
            y[...] = sums


def logits(x, w, b, arena):
    """As `linear`."""
    return linear(x, w, b, arena)


def linear_backward_input(dy, w, saved, arena, out=None):
    """dy: (M, N); w: (N, K); dx: (M, K)"""
    dx = arena.take(saved.shape, dy.dtype) if out is None else out
    put_product(dy, w, dx, False, arena)
    return dx, (dy, saved)


def gelu_linear_backward_input(dy, w, saved, before, arena):
    """dy: (M, N); w: (N, K); before, the slope, becomes dz: (M, K)"""
    dx, pending = linear_backward_input(dy, w, saved, arena)
    before *= dx
    return before, pending


def linear_backward_weight(pending, dw, accumulate, arena):
    """dw: (N, K)"""
    dy, x = pending
    put_product(dy.T, x, dw, accumulate, arena)


def linear_backward_bias(pending, db, accumulate, arena):
    """db: (N,)"""
    sum_rows(pending[0], db, accumulate, arena)


def linear_gelu(x, w, b, arena):
    """Shapes as in `linear`."""
    y = _product(x, w, arena)
    return y, (x, _gelu(y, b, arena))


def _gelu(y, b, arena):
    """With h = (1 + tanh u) / 2 and u = c1 z + c3 z^3: y = z h, and its slope is h + (1 - h) y (2 c1 + 6 c3 z^2).

    y holds z - b, and becomes y. Returns the slope; z, h, y and the slope: (M, N), computed in blocks of rows
    """
    every_slope = arena.take(y.shape, y.dtype)
    scratch = arena.take((2, *block_shape(y)), y.dtype)
    c1, c3 = GELU_SCALE, GELU_SCALE * GELU_CUBIC
    for rows in row_blocks(y):
        z, slope = y[rows], every_slope[rows]
        h, rest = scratch[:, : len(z)]
        if b is not None:
            z += b
        np.multiply(z, z, out=slope)
        np.multiply(slope, c3, out=h)
        h += c1
        h *= z
        np.tanh(h, out=h)
        h *= 0.5
        h += 0.5
        z *= h  # from here on z holds y
        slope *= 6 * c3
        slope += 2 * c1
        slope *= z
        slope *= np.subtract(1, h, out=rest)
        slope += h
    return every_slope


def linear_gelu_backward_input(dy, w, saved, arena, out=None):
    """dy and the slope: (M, N); w: (N, K); dx: (M, K). The slope becomes dz."""
    x, slope = saved
    slope *= dy
    return linear_backward_input(slope, w, x, arena, out)


def linear_relu(x, w, b, arena):
    """Shapes as in `linear`; the slope, 0 or 1: (M, N)"""
    y, _ = linear(x, w, b, arena)
    y, slope = relu(y, arena)
    return y, (x, slope)


linear_relu_backward_input = linear_gelu_backward_input


def gelu(z, arena):
    """z, of any shape, becomes y."""
    return z, _gelu(z.reshape(-1, z.shape[-1]), None, arena).reshape(z.shape)


def gelu_backward(dy, saved, arena):
    """The slope becomes dz."""
    saved *= dy
    return saved


def relu(z, arena):
    """z, of any shape, becomes y; the slope is 0 or 1."""
    slope = arena.take(z.shape, z.dtype)
    np.greater(z, 0, out=slope)
    np.maximum(z, 0, out=z)
    return z, slope


relu_backward = gelu_backward


def weighted_sum(a, alpha, b, beta, out, arena):
    """a, b, out: of one shape, computed in blocks of rows"""
    scratch = arena.take(block_shape(out), out.dtype)
    for rows in row_blocks(out):
        part = None if b is None else np.multiply(b[rows], beta, out=scratch[: len(out[rows])])
        np.multiply(a[rows], alpha, out=out[rows])
        if part is not None:
            out[rows] += part


def _product(x, w, arena, out=None):
    """x w^T, (M, N), in one call: BLAS packs w anew in every call, which at 128 rows a call costs a third of the product."""
    y = arena.take((len(x), len(w)), x.dtype) if out is None else out
    put_product(x, w.T, y, False, arena)
    return y
