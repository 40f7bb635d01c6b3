"""A mixture of experts: the choice, products of each expert's rows, and weighted sums of rows.

The weighted sums take one choice of each token at a time.
"""

import numpy as np

from mpitrain.ops.host.layers import linear
from mpitrain.ops.host.product import put_product, row_blocks
from mpitrain.ops.reference.experts import parts


def score(x, w, arena):
    return linear(x, w, None, arena)


def choose(logits, k, before, arena):
    order = np.negative(logits, out=arena.take(logits.shape, logits.dtype))
    chosen = np.ascontiguousarray(order.argsort(axis=1, kind="stable")[:, :k])
    weights = arena.take(chosen.shape, logits.dtype)
    every = np.arange(len(logits))[:, None]
    if before:
        weights[...] = _softmax(logits, arena)[every, chosen]
    else:
        weights[...] = logits[every, chosen]
        _softmax(weights, arena, weights)
    return weights, chosen, (logits, weights, chosen)


def choose_backward(dweights, saved, load, weight, balance, z, before, dlogits, arena):
    logits, weights, chosen = saved
    every = np.arange(len(logits))[:, None]
    load = load.sum(axis=0)
    tokens = len(logits) // max(1, len(load))
    weight = np.zeros((len(load), 1)) if weight is None else weight
    pulls = (balance * weight * load).astype(dlogits.dtype, copy=False)
    dlogits[...] = np.repeat(pulls, tokens, axis=0)
    if before:
        dlogits[every, chosen] += dweights
    probabilities = _softmax(logits, arena)
    if z:
        # The log of the sum is that of the first logit less that of its probability; both are finite
        # at the largest one.
        largest = chosen[:, :1]
        lse = logits[every, largest] - np.log(probabilities[every, largest])
        pull = 2 * np.repeat((z * weight).astype(dlogits.dtype, copy=False), tokens, axis=0) * lse
        dlogits += pull
        means = np.einsum("me,me->m", probabilities, dlogits)[:, None] - pull
    else:
        means = np.einsum("me,me->m", probabilities, dlogits)[:, None]
    dlogits -= means
    dlogits *= probabilities
    if not before:
        inner = (weights * dweights).sum(axis=1, keepdims=True)
        dlogits[every, chosen] += weights * (dweights - inner)


def _softmax(logits, arena, out=None):
    out = arena.take(logits.shape, logits.dtype) if out is None else out
    if logits.size:
        np.subtract(logits, logits.max(axis=1, keepdims=True), out=out)
        np.exp(out, out=out)
        out /= out.sum(axis=1, keepdims=True)
    return out


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
