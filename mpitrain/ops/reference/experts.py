"""A mixture of experts: the choice of experts for each token, and the weighted sum of their outputs.

Tokens are sorted by expert with `embedding` (a gather of rows), and each expert multiplies its rows
with `linear`. The sums of a gather's gradient are a `combine` without weights.
"""

import numpy as np

from mpitrain.ops.table import operation


@operation("logits:BT,2V k=2 before=1 -> weights:BT,2 chosen:BT,2 saved", "weights", launches=0)
def choose(logits, k, before, arena):
    """Return (weights, chosen, saved): the k experts with the largest logits of each token, the largest first.

    The weights are the softmax of the chosen logits (before 0, as Mixtral), or those of the softmax of
    all logits, whose sum is below 1 (before 1, as Qwen2-MoE). Of equal logits the first are chosen.
    logits: (M, E); weights: (M, k); chosen: (M, k) int64
    """
    chosen = (-logits).argsort(axis=1, kind="stable")[:, :k]
    probabilities = _softmax(logits)
    picked = np.take_along_axis(logits, chosen, axis=1)
    weights = np.take_along_axis(probabilities, chosen, axis=1) if before else _softmax(picked)
    return weights, chosen, (logits, weights, chosen)


@operation(
    "dweights:BT,2 saved@choose pulls:B,2V z:B,1 before=1 -> dlogits:BT,2V", "dlogits", launches=0
)
def choose_backward(dweights, saved, pulls, z, before, arena):
    """Return the gradient of the logits, with those of two terms of the loss.

    The first term is the sum over the M tokens of sum over e of pulls[b, e] times the softmax of all
    logits, where b is the sequence of the token. The second is the sum of z[b] times the square of the
    log of the sum of exponentials.
    dweights: (M, k); pulls: (B, E) and z: (B, 1), M / B tokens each; dlogits: (M, E)
    """
    logits, weights, chosen = saved
    probabilities = _softmax(logits)
    tokens = len(logits) // max(1, len(pulls))
    pull, z = np.repeat(pulls, tokens, axis=0), np.repeat(z, tokens, axis=0)
    if before:
        pull = pull.copy()
        _add_at(pull, chosen, dweights)
    shift = logits.max(axis=1, keepdims=True, initial=-np.inf)
    lse = np.log(np.exp(logits - shift).sum(axis=1, keepdims=True)) + shift
    mean = (probabilities * pull).sum(axis=1, keepdims=True)
    dlogits = probabilities * (pull - mean + 2 * z * lse)
    if not before:
        inner = weights * (dweights - (weights * dweights).sum(axis=1, keepdims=True))
        _add_at(dlogits, chosen, inner)
    return dlogits


@operation("rows:M,C places<M!:M,1 weights:M,1 -> y:M,C saved", "y", launches=0)
def combine(rows, places, weights, arena):
    """Return (y, saved) with y[m] the sum over j of weights[m, j] rows[places[m, j]].

    A place below 0 counts as a row of zeros. Without weights (None), all are 1.
    rows: (R, C); places: (M, k); weights: (M, k); y: (M, C)
    """
    taken = _taken(rows, places)
    y = taken.sum(axis=1) if weights is None else (taken * weights[..., None]).sum(axis=1)
    return y, (rows, places, weights)


@operation("dy:M,C saved@combine sources<M!:M -> drows:M,C dweights:M,1", "drows", launches=0)
def combine_backward(dy, saved, sources, arena):
    """Return (drows, dweights), for rows that each stand in one place.

    sources: (R,), the place of each row as a number in the flat places: sources[places[m, j]] is k m + j
    dy: (M, C); drows: (R, C); dweights: (M, k)
    """
    rows, places, weights = saved
    drows = dy[sources // places.shape[1]] * weights.reshape(-1)[sources, None]
    taken = _taken(rows, places)
    return drows, (taken * dy[:, None]).sum(axis=2)


def _taken(rows, places):
    taken = np.zeros((*places.shape, rows.shape[1]), rows.dtype)
    taken[places >= 0] = rows[places[places >= 0]]
    return taken


def _softmax(logits):
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def _add_at(array, columns, values):
    np.put_along_axis(array, columns, np.take_along_axis(array, columns, axis=1) + values, axis=1)
