"""A mixture of experts: products of each expert's rows, and weighted sums of rows.

The weighted sums take one choice of each token at a time.
"""

import numpy as np

from mpitrain.ops.host.layers import linear
from mpitrain.ops.host.product import put_product, row_blocks
from mpitrain.ops.reference.experts import parts


def score(x, w, arena):
    return linear(x, w, None, arena)


def dispatch(x, sources, k, arena, weights=None):
    rows = arena.take((len(sources), x.shape[1]), x.dtype)
    for block in row_blocks(rows):
        if len(x):
            np.take(x, sources[block] // k, axis=0, out=rows[block], mode="clip")
            if weights is not None:
                rows[block] *= weights.reshape(-1)[sources[block], None]
    return rows


def combine(rows, places, weights, arena, out=None):
    y = arena.take((len(places), rows.shape[1]), rows.dtype) if out is None else out
    for block in row_blocks(y):
        y[block] = 0
        for column in range(places.shape[1]):
            y[block] += _taken(rows, places[block, column], weights, block, column, arena)
    return y, (rows, places, weights)


def combine_backward(dy, saved, arena, out=None):
    rows, places, _ = saved
    dweights = arena.take(places.shape, rows.dtype) if out is None else out
    for block in row_blocks(dy):
        for column in range(places.shape[1]):
            taken = _taken(rows, places[block, column], None, block, column, arena)
            np.einsum("mc,mc->m", taken, dy[block], out=dweights[block, column])
    return dweights


def _taken(rows, places, weights, block, column, arena):
    """Return the rows at some places, times their weights; zeros at places below 0."""
    taken = arena.take((len(places), rows.shape[1]), rows.dtype)
    if len(rows):
        np.take(rows, places, axis=0, out=taken, mode="clip")
    taken[places < 0] = 0
    if weights is not None:
        taken *= weights[block, column, None]
    return taken


def grouped_linear(x, w, ends, arena):
    y = arena.take((len(x), w.shape[1]), x.dtype)
    y[ends[-1] :] = 0
    for part, matrix in zip(parts(ends), w, strict=True):
        put_product(x[part], matrix.T, y[part], False, arena)
    return y, (x, ends)


def grouped_linear_backward_input(dy, w, saved, arena):
    x, ends = saved
    dx = arena.take(x.shape, dy.dtype)
    dx[ends[-1] :] = 0
    for part, matrix in zip(parts(ends), w, strict=True):
        put_product(dy[part], matrix, dx[part], False, arena)
    return dx, (dy, x, ends)


def grouped_linear_backward_weight(pending, dw, accumulate, arena):
    dy, x, ends = pending
    for part, matrix in zip(parts(ends), dw, strict=True):
        put_product(dy[part].T, x[part], matrix, accumulate, arena)
