"""LayerNorm. C channels, M rows; `saved` holds the normalised rows and 1 / standard deviation."""

import numpy as np

from mpitrain.ops.host.blocks import block_shape, row_blocks, sum_rows
from mpitrain.ops.reference import EPSILON


def layer_norm(x, gain, bias, arena):
    y, normal = arena.take(x.shape, x.dtype), arena.take(x.shape, x.dtype)
    inverse = arena.take((len(x), 1), x.dtype)
    mean = arena.take((x.shape[1],), x.dtype)
    mean.fill(1 / x.shape[1])
    for rows in row_blocks(x):
        n, i = normal[rows], inverse[rows]
        np.matmul(x[rows], mean, out=i[:, 0])
        np.subtract(x[rows], i, out=n)
        np.einsum("mc,mc->m", n, n, out=i[:, 0])
        i /= x.shape[1]
        i += EPSILON
        np.sqrt(i, out=i)
        np.divide(1, i, out=i)
        n *= i
        np.multiply(n, gain, out=y[rows])
        y[rows] += bias
    return y, (normal, inverse)


def layer_norm_backward_input(dy, gain, saved, arena):
    normal, inverse = saved
    dx = arena.take(dy.shape, dy.dtype)
    mean, weighted = arena.take((len(dy), 1), dy.dtype), arena.take((len(dy), 1), dy.dtype)
    product = arena.take(block_shape(dy), dy.dtype)
    for rows in row_blocks(dy):
        d, n = dx[rows], normal[rows]
        np.multiply(dy[rows], gain, out=d)
        np.matmul(dy[rows], gain, out=mean[rows, 0])
        np.einsum("mc,mc->m", d, n, out=weighted[rows, 0])
        mean[rows] /= dy.shape[1]
        weighted[rows] /= dy.shape[1]
        d -= mean[rows]
        d -= np.multiply(n, weighted[rows], out=product[:len(d)])
        d *= inverse[rows]
    return dx, (dy, normal)


def layer_norm_backward_gain(pending, dgain, accumulate, arena):
    dy, normal = pending
    part = arena.take(dgain.shape, dgain.dtype)
    if not accumulate:
        dgain.fill(0)
    for rows in row_blocks(dy):
        dgain += np.einsum("mc,mc->c", dy[rows], normal[rows], out=part)


def layer_norm_backward_bias(pending, dbias, accumulate, arena):
    sum_rows(pending[0], dbias, accumulate, arena)
