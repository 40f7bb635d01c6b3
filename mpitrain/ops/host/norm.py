"""LayerNorm. C channels, M rows; `saved` holds the normalised rows (M, C) and 1 / standard
deviation (M, 1).

`layer_norm_backward_input` also computes the gradients of gain and bias, while its blocks are in
cache. `pending` is the pair of them.
"""

import numpy as np

from mpitrain.ops.host.blocks import block_shape, blocks_of, constant
from mpitrain.ops.reference.layers import put


def layer_norm(x, gain, bias, epsilon, arena):
    """Return (y, saved).    x, y: (M, C); gain, bias: (C,)"""
    every_y, normal = arena.take(x.shape, x.dtype), arena.take(x.shape, x.dtype)
    every_inverse = arena.take((len(x), 1), x.dtype)
    mean = constant(x.shape[1], 1 / x.shape[1], x.dtype)
    for block, y, n, inverse in blocks_of(x, every_y, normal, every_inverse):
        column = inverse[:, 0]
        np.matmul(block, mean, out=column)
        np.subtract(block, inverse, out=n)
        np.vecdot(n, n, out=column)
        inverse *= mean[0]
        inverse += epsilon
        np.sqrt(inverse, out=inverse)
        np.divide(1, inverse, out=inverse)
        n *= inverse
        np.multiply(n, gain, out=y)
        y += bias
    return every_y, (normal, every_inverse)


def layer_norm_backward_input(dy, gain, saved, arena, residual=None):
    """Return (dx, (dgain, dbias)).    dy, dx, residual: (M, C); gain, dgain, dbias: (C,)"""
    normal, every_inverse = saved
    dx = arena.take(dy.shape, dy.dtype)
    dgain, dbias, part = arena.take((3, dy.shape[1]), dy.dtype)
    dgain.fill(0)
    dbias.fill(0)
    scratch = arena.take(block_shape(dy), dy.dtype)
    ones = constant(len(scratch), 1, dy.dtype)
    means = arena.take((len(scratch), 2), dy.dtype)
    weights = gain / dy.shape[1]
    for block, n, d, inverse, more in blocks_of(dy, normal, dx, every_inverse, residual):
        count = len(d)
        row_of_ones, product, mean = ones[:count], scratch[:count], means[:count]
        np.multiply(block, n, out=product)
        dgain += np.matmul(row_of_ones, product, out=part)
        dbias += np.matmul(row_of_ones, block, out=part)
        np.matmul(block, weights, out=mean[:, 0])  # This is the mean of dy gain.
        np.matmul(product, weights, out=mean[:, 1])  # This is the mean of dy gain normal.
        np.multiply(block, gain, out=d)
        d -= mean[:, :1]
        d -= np.multiply(n, mean[:, 1:], out=product)
        d *= inverse
        if more is not None:
            d += more
    return dx, (dgain, dbias)


def layer_norm_backward_weight(pending, dgain, dbias, accumulate, arena):
    """Write or add dgain and dbias; either may be None.    dgain, dbias: (C,)"""
    for sums, out in zip(pending, (dgain, dbias), strict=True):
        if out is not None:
            put(sums, out, accumulate)
