"""Passes over rows in NumPy: GELU, LayerNorm and the weights of attention, forward and backward.

passes.cpp has functions of the same names and arguments. So an operation with a pass takes first
`passes_of`: a function of arrays that returns the passes for them, `NUMPY` or a library.

M rows, C channels. A tile or block of attention has Q queries and K keys: query i sees the columns
before `end` + i, but of these only starts[i] .. ends[i] - 1, where these are given; (Q,) int64.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np

from mpitrain.ops.host.product import block_shape, blocks_of, causal_mask, constant


def gelu(c1, c3, y, b, every_slope, arena):
    """Replace y by gelu(y + b), and write the slope.

    The result is z h, where z = y + b and h = (1 + tanh u) / 2. Here u = c1 z + c3 z^3. Its slope
    is h + (1 - h) z h (2 c1 + 6 c3 z^2).
    y, every_slope: (M, C), computed in blocks of rows; b: (C,) or None
    """
    scratch = arena.take((2, *block_shape(y)), y.dtype)
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


def layer_norm(epsilon, x, gain, bias, every_y, every_normal, every_inverse):
    """Write normal = (x - mean) inverse, and y = normal gain + bias.

    x, y, normal: (M, C); inverse: (M, 1), 1 / standard deviation
    """
    mean = constant(x.shape[1], 1 / x.shape[1], x.dtype)
    for block, y, normal, inverse in blocks_of(x, every_y, every_normal, every_inverse):
        column = inverse[:, 0]
        np.matmul(block, mean, out=column)
        np.subtract(block, inverse, out=normal)
        np.vecdot(normal, normal, out=column)
        inverse *= mean[0]
        inverse += epsilon
        np.sqrt(inverse, out=inverse)
        np.divide(1, inverse, out=inverse)
        normal *= inverse
        np.multiply(normal, gain, out=y)
        y += bias


def layer_norm_backward(
    dy, gain, every_normal, every_inverse, residual, dx, dgain, dbias, part, arena
):
    """Write dx = (dy gain - mean(dy gain) - normal mean(dy gain normal)) inverse + residual; and the
    sums over rows of dy normal and of dy.

    dy, normal, dx, residual or None: (M, C); inverse: (M, 1); dgain, dbias: (C,); part: scratch (2, C)
    """
    dgain.fill(0)
    dbias.fill(0)
    scratch = arena.take(block_shape(dy), dy.dtype)
    ones = constant(len(scratch), 1, dy.dtype)
    means = arena.take((len(scratch), 2), dy.dtype)
    weights = gain / dy.shape[1]
    for block, normal, d, inverse, more in blocks_of(dy, every_normal, dx, every_inverse, residual):
        count = len(d)
        row_of_ones, product, mean = ones[:count], scratch[:count], means[:count]
        np.multiply(block, normal, out=product)
        dgain += np.matmul(row_of_ones, product, out=part[0])
        dbias += np.matmul(row_of_ones, block, out=part[0])
        np.matmul(block, weights, out=mean[:, 0])  # This is the mean of dy gain.
        np.matmul(product, weights, out=mean[:, 1])  # This is the mean of dy gain normal.
        np.multiply(block, gain, out=d)
        d -= mean[:, :1]
        d -= np.multiply(normal, mean[:, 1:], out=product)
        d *= inverse
        if more is not None:
            d += more


def hide_others(end, starts, ends, scores):
    """Set the scores of the keys that a query does not see to -inf, in place.    scores: (..., Q, K)"""
    *_, queries, keys = scores.shape
    # The first rows see only some of the last columns.
    first, rows = max(0, end - 1), min(queries, keys - end + 1)
    if rows > 0:
        mask = causal_mask(keys - end + 1, scores.dtype)
        masked = scores[..., :rows, first:]
        np.add(masked, mask[:rows, first - end + 1 :], out=masked)
    if starts is not None and starts[-1] > 0:
        np.copyto(scores, -np.inf, where=np.arange(keys) < starts[:, None])
    if ends is not None and ends[0] < keys:
        np.copyto(scores, -np.inf, where=np.arange(keys) >= ends[:, None])


def weigh_block(end, least, most, starts, ends, exp, inverse):
    """Replace scores by their exponentials, 0 for keys that a query does not see, and write 1 / row sum.

    exp      (G, R, Q, K), the scores at first
    inverse  (G, R, Q, 1)
    returns  whether every row sum is within (least, most)
    """
    hide_others(end, starts, ends, exp)
    np.exp(exp, out=exp)
    np.matmul(exp, constant(exp.shape[3], 1, exp.dtype), out=inverse[..., 0])
    # A method of the array would call these through a function in Python.
    is_safe = least < np.minimum.reduce(inverse, None) and np.maximum.reduce(inverse, None) < most
    np.divide(1, inverse, out=inverse)
    return is_safe


def block_backward(exp, inverse, dscores, masks):
    """Turn the gradient of a block's weights into that of its scores, in place.

    masks  of dropout, or None; becomes the weights after dropout
    exp, dscores, masks: (G, R, Q, K); inverse: (G, R, Q, 1)
    """
    if masks is not None:
        dscores *= masks
        np.multiply(exp, masks, out=masks)
    dot = np.vecdot(exp, dscores)[..., None]
    dot *= inverse
    dscores -= dot
    dscores *= exp


def weigh_tile(end, is_first, starts, ends, scores, dropped, sums):
    """Replace scores by their exponentials, and write the row sums if `is_first`, or add them.

    dropped  the mask of dropout, which is multiplied by the exponentials, or None
    scores, dropped: (Q, K); sums: (Q,)
    """
    hide_others(end, starts, ends, scores)
    np.exp(scores, out=scores)
    if dropped is not None:
        np.multiply(dropped, scores, out=dropped)
    ones = constant(scores.shape[1], 1, scores.dtype)
    if is_first:
        np.matmul(scores, ones, out=sums)
    else:
        sums += np.matmul(scores, ones)


def tile_backward(end, starts, ends, weights, dscores, dropped, minus_dots):
    """Replace scores by their exponentials, and the gradient of these by that of the scores.

    dropped     the mask of dropout, which is multiplied by the exponentials, or None
    minus_dots  with dropout, (Q, 1), which is added to the gradient of the exponentials
    weights, dscores, dropped: (Q, K)
    """
    hide_others(end, starts, ends, weights)
    np.exp(weights, out=weights)
    if dropped is not None:
        np.multiply(dscores, dropped, out=dscores)
        np.add(dscores, minus_dots, out=dscores)
        np.multiply(dropped, weights, out=dropped)
    np.multiply(dscores, weights, out=dscores)


NUMPY = SimpleNamespace(
    gelu=gelu,
    layer_norm=layer_norm,
    layer_norm_backward=layer_norm_backward,
    weigh_block=weigh_block,
    block_backward=block_backward,
    weigh_tile=weigh_tile,
    tile_backward=tile_backward,
)


def by_numpy(*arrays: Any) -> Any:
    """Return the passes of NumPy, for any arrays."""
    return NUMPY
