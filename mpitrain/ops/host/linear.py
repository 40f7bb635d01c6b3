"""Matrix products with bias and activation, and passes over rows.

M rows, K inputs, N outputs; z is the input of an activation. Contents of `saved` and `pending`:

linear           saved is x; pending is (dy, x)
with activation  saved is (x, the activation's slope at every element); pending is (dz, x)
"""

import numpy as np

from mpitrain.ops.host.blocks import block_shape, blocks_of, row_blocks, sum_rows
from mpitrain.ops.host.product import put_product
from mpitrain.ops.random_bits import RandomBits, scale, threshold
from mpitrain.ops.reference.layers import GELU_CUBIC, GELU_SCALE


def linear(x, w, b, arena, out=None, residual=None):
    """Return (y, saved).    x: (M, K); w: (N, K); b: (N,) or None; y and the residual: (M, N)"""
    y = _product(x, w, arena, out)
    add_bias(y, b, y, arena, residual)
    return y, x


def add_bias(x, b, out, arena, residual=None):
    """Write x + b + residual to out, in blocks of rows.

    x, residual, out: (..., N); b: (N,) or None
    """
    for y, sums, more in blocks_of(out, x, residual):
        if b is not None:
            sums = np.add(sums, b, out=y)
        if more is not None:
            sums = np.add(sums, more, out=y)
        if sums is not y and out is not x:
            y[...] = sums


def dequantize(q, scale, out, arena):
    """Write (q - 128) times the scale of each row to out, in blocks of rows.

    q: (N, K) uint8; scale: (N,); out: (N, K)
    """
    for rows in row_blocks(out):
        np.subtract(q[rows], 128, out=out[rows], dtype=out.dtype)
        out[rows] *= scale[rows, None]


def logits(x, w, b, arena):
    """Return the result of `linear`."""
    return linear(x, w, b, arena)


def linear_backward_input(dy, w, saved, arena, out=None):
    """Return dx = dy w, and the state for the weight and bias halves.

    dy: (M, N); w: (N, K); dx: (M, K)
    """
    dx = arena.take(saved.shape, dy.dtype) if out is None else out
    put_product(dy, w, dx, False, arena)
    return dx, (dy, saved)


def gelu_linear_backward_input(dy, w, saved, before, arena):
    """Return dz = (dy w) * slope, and the state for the weight half. dz overwrites the slope,
    `before`.

    dy: (M, N); w: (N, K); before, dz: (M, K)
    """
    dx, pending = linear_backward_input(dy, w, saved, arena)
    before *= dx
    return before, pending


def linear_backward_weight(pending, dw, accumulate, arena, db=None):
    """Write or add dw, and write db if it is given.    dw: (N, K); db: (N,)"""
    dy, x = pending
    put_product(dy.T, x, dw, accumulate, arena)
    if db is not None:
        linear_backward_bias(pending, db, False, arena)


def linear_backward_bias(pending, db, accumulate, arena):
    """Write or add db.    db: (N,)"""
    sum_rows(pending[0], db, accumulate, arena)


def linear_gelu(x, w, b, arena):
    """Return (y, saved), shapes as in `linear`."""
    y = _product(x, w, arena)
    return y, (x, _gelu(y, b, arena))


def _gelu(y, b, arena):
    """Replace y by gelu(y + b), and return the slope.

    The result is z h, where z = y + b and h = (1 + tanh u) / 2. Here u = c1 z + c3 z^3. Its slope
    is h + (1 - h) z h (2 c1 + 6 c3 z^2).
    y, slope: (M, N), computed in blocks of rows
    """
    every_slope = arena.take(y.shape, y.dtype)
    scratch = arena.take((2, *block_shape(y)), y.dtype)
    c1, c3 = GELU_SCALE, GELU_SCALE * GELU_CUBIC
    for z, slope in blocks_of(y, every_slope):
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
        z *= h  # from here on, z holds the result
        slope *= 6 * c3
        slope += 2 * c1
        slope *= z
        slope *= np.subtract(1, h, out=rest)
        slope += h
    return every_slope


def linear_gelu_backward_input(dy, w, saved, arena, out=None):
    """Return dx, and the state for the weight and bias halves. dz overwrites the saved slope.

    dy and the slope: (M, N); w: (N, K); dx: (M, K)
    """
    x, slope = saved
    slope *= dy
    return linear_backward_input(slope, w, x, arena, out)


def linear_relu(x, w, b, arena):
    """Return (y, saved), shapes as in `linear`; the slope, 0 or 1, is (M, N)."""
    y, _ = linear(x, w, b, arena)
    y, slope = relu(y, arena)
    return y, (x, slope)


linear_relu_backward_input = linear_gelu_backward_input


def gelu(z, arena):
    """Return (y, slope); y is written over z, of any shape."""
    return z, _gelu(z.reshape(-1, z.shape[-1]), None, arena).reshape(z.shape)


def gelu_backward(dy, saved, arena):
    """Return dz, written over the saved slope."""
    saved *= dy
    return saved


def relu(z, arena):
    """Return (y, slope); y is written over z, of any shape; the slope is 0 or 1."""
    slope = arena.take(z.shape, z.dtype)
    np.greater(z, 0, out=slope)
    np.maximum(z, 0, out=z)
    return z, slope


relu_backward = gelu_backward


def weighted_sum(a, alpha, b, beta, out, arena):
    """Write alpha a + beta b to out, in blocks of rows.    a, b, out: one shape"""
    scratch = arena.take(block_shape(out), out.dtype)
    for rows in row_blocks(out):
        part = None if b is None else np.multiply(b[rows], beta, out=scratch[: len(out[rows])])
        np.multiply(a[rows], alpha, out=out[rows])
        if part is not None:
            out[rows] += part


def dropout(x, key, step, first, columns, rate, arena, residual=None, out=None):
    """Return x mask / (1 - p) + residual.    x, residual, out: (M, C)"""
    y = arena.take(x.shape, x.dtype) if out is None else out
    bits, least, most = RandomBits(key, step), np.uint16(threshold(rate)), scale(rate)
    scratch, width = arena.take(block_shape(x), x.dtype), x.shape[1]
    for rows in row_blocks(x):
        mask, block = scratch[: len(x[rows])], y[rows]
        run = bits.run(first + rows.start * columns, (len(mask) - 1) * columns + width)
        np.greater_equal(_rows(run, len(mask), width, columns), least, out=mask)
        np.multiply(x[rows], mask, out=block)
        block *= most
        if residual is not None:
            block += residual[rows]
    return y


def _rows(run, rows, width, columns):
    """Return a view (rows, width) of rows that begin `columns` elements apart."""
    step = run.itemsize
    return np.lib.stride_tricks.as_strided(run, (rows, width), (columns * step, step))


def _product(x, w, arena, out=None):
    """Return x w^T, (M, N), computed in one call of BLAS.

    BLAS packs w anew in every call. At 128 rows a call, that costs a third of the product.
    """
    y = arena.take((len(x), len(w)), x.dtype) if out is None else out
    put_product(x, w.T, y, False, arena)
    return y
