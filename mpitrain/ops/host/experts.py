"""A mixture of experts: the choice, and weighted sums of rows, one choice of each token at a time."""

import numpy as np

from mpitrain.ops.host.product import row_blocks


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


def choose_backward(dweights, saved, pulls, z, before, arena):
    logits, weights, chosen = saved
    every = np.arange(len(logits))[:, None]
    dlogits = arena.take(logits.shape, logits.dtype)
    tokens = len(logits) // max(1, len(pulls))
    dlogits[...] = np.repeat(pulls, tokens, axis=0)
    if before:
        dlogits[every, chosen] += dweights
    probabilities = _softmax(logits, arena)
    if z.any():
        # The log of the sum is that of the first logit less that of its probability; both are finite
        # at the largest one.
        largest = chosen[:, :1]
        lse = logits[every, largest] - np.log(probabilities[every, largest])
        pull = 2 * np.repeat(z, tokens, axis=0) * lse
        dlogits += pull
        means = np.einsum("me,me->m", probabilities, dlogits)[:, None] - pull
    else:
        means = np.einsum("me,me->m", probabilities, dlogits)[:, None]
    dlogits -= means
    dlogits *= probabilities
    if not before:
        inner = (weights * dweights).sum(axis=1, keepdims=True)
        dlogits[every, chosen] += weights * (dweights - inner)
    return dlogits


def _softmax(logits, arena, out=None):
    out = arena.take(logits.shape, logits.dtype) if out is None else out
    if logits.size:
        np.subtract(logits, logits.max(axis=1, keepdims=True), out=out)
        np.exp(out, out=out)
        out /= out.sum(axis=1, keepdims=True)
    return out


def combine(rows, places, weights, arena):
    y = arena.take((len(places), rows.shape[1]), rows.dtype)
    for block in row_blocks(y):
        y[block] = 0
        for column in range(places.shape[1]):
            y[block] += _taken(rows, places[block, column], weights, block, column, arena)
    return y, (rows, places, weights)


def combine_backward(dy, saved, sources, arena):
    rows, places, weights = saved
    drows = arena.take(rows.shape, rows.dtype)
    dweights = arena.take(places.shape, rows.dtype)
    for block in row_blocks(drows):
        if len(dy):
            np.take(dy, sources[block] // places.shape[1], axis=0, out=drows[block], mode="clip")
            drows[block] *= weights.reshape(-1)[sources[block], None]
    for block in row_blocks(dy):
        for column in range(places.shape[1]):
            taken = _taken(rows, places[block, column], None, block, column, arena)
            np.einsum("mc,mc->m", taken, dy[block], out=dweights[block, column])
    return drows, dweights


def _taken(rows, places, weights, block, column, arena):
    """Return the rows at some places, times their weights; zeros at places below 0."""
    taken = arena.take((len(places), rows.shape[1]), rows.dtype)
    if len(rows):
        np.take(rows, places, axis=0, out=taken, mode="clip")
    taken[places < 0] = 0
    if weights is not None:
        taken *= weights[block, column, None]
    return taken
