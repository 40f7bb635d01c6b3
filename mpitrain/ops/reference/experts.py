"""A mixture of experts: scores of tokens, the choice, rows sorted by expert, products of their runs, weighted sums.

M tokens, B sequences, E experts, k experts of a token; R = k M rows, of which the last ones are
nobody's where tokens are dropped. The rows of expert e end before row ends[e], where those of the next one begin.
"""

from itertools import pairwise

import numpy as np

from mpitrain.ops.reference.layers import into, put
from mpitrain.ops.table import operation


@operation("x:M,K w:N,K -> y:M,N saved", "nothing", products="MNK")
def score(x, w, arena):
    """Return (y, saved) of a `linear` without bias, whose y is never in half precision.

    x: (M, C); w: (E, C); y: (M, E)
    """
    return x @ w.T, x


@operation("logits:BT,2V k=2 before=1 -> weights:BT,2 chosen:BT,2 saved", "nothing")
def choose(logits, k, before, arena):
    """Return (weights, chosen, saved): the k experts with the largest logits of each token, the largest first.

    The weights are the softmax of the chosen logits (before 0, as Mixtral), or those of the softmax of
    all logits, whose sum is below 1 (before 1, as Qwen2-MoE). Of equal logits the first are chosen.
    logits: (M, E); weights: (M, k); chosen: (M, k) int64
    """
    chosen = np.ascontiguousarray((-logits).argsort(axis=1, kind="stable")[:, :k])
    every = np.arange(len(logits))[:, None]
    weights = _softmax(logits)[every, chosen] if before else _softmax(logits[every, chosen])
    return weights, chosen, (logits, weights, chosen)


@operation(
    "dweights:BT,2 saved@choose load<V:B,2,2V weight:B,1 balance=0.5 z=0.25 before=1 dlogits:BT,2V -> dlogits",
    "dlogits",
)
def choose_backward(dweights, saved, load, weight, balance, z, before, dlogits, arena):
    """Write the gradient of the logits, with those of two terms of the loss.

    The first term is `balance` times the sum over the M tokens of weight[b] times the sum over e of
    load[b, :, e] times the softmax of all logits, where b is the sequence of the token. The second is `z`
    times the sum of weight[b] times the square of the log of the sum of exponentials.
    dweights: (M, k); load: (B, Q, E), of Q chunks of each sequence; weight: (B, 1), M / B tokens each, None:
    zeros; dlogits: (M, E)
    """
    logits, weights, chosen = saved
    every, probabilities = np.arange(len(logits))[:, None], _softmax(logits)
    weight = np.zeros((len(load), 1), logits.dtype) if weight is None else weight

    def of_rows(of_sequences):
        return np.repeat(of_sequences, len(logits) // max(1, len(load)), axis=0)

    dlogits[...] = of_rows(balance * weight * load.sum(axis=1))
    if before:
        dlogits[every, chosen] += dweights
    pull = 0
    if z:
        # The first choice has the largest logit and probability, so that both logs are finite.
        largest = every, chosen[:, :1]
        pull = 2 * of_rows(z * weight) * (logits[largest] - np.log(probabilities[largest]))
        dlogits += pull
    mean = np.einsum("me,me->m", probabilities, dlogits)[:, None] - pull
    dlogits -= mean
    dlogits *= probabilities
    if not before:
        inner = (weights * dweights).sum(axis=1, keepdims=True)
        dlogits[every, chosen] += weights * (dweights - inner)


@operation("chosen<H:BT,2 experts=H sequences=B chunks=1 -> load:B,1,H", "nothing")
def count_choices(chosen, experts, sequences, chunks, arena):
    """Return the choices of each expert in each chunk of each sequence, (B, chunks, E).

    chosen: (M, k), the experts of each token
    """
    kinds = _runs(chosen.size, sequences * chunks) * experts + chosen.reshape(-1)
    counts = np.bincount(kinds, minlength=sequences * chunks * experts)
    return counts.reshape(sequences, chunks, experts)


@operation(
    "chosen<H:BT,2 load@count_choices first=0 last=0 capacity=3 -> places:BT,2 sources:2BT ends:H",
    "nothing",
    launches=2,
)
def permute(chosen, load, first, last, capacity, arena):
    """Return (places, sources, ends): the choices of tokens, sorted by expert.

    Choices of one expert keep their order.
    chosen       (M, k): the experts of each token
    load         (B, Q, E): choices in each of the Q chunks of a sequence
    first, last  the chunks of these tokens; first = last: there is one
    capacity     the most choices that an expert takes of one sequence, the first ones
    places       (M, k): the row of each choice; -1: dropped
    sources      (k M,): the choice of each row, as a number in the flat places: k m + j. Behind the
                 last row stand zeros, so that buffers have one size whatever is dropped
    ends         (E,): the row behind the last one of each expert
    """
    flat, experts = chosen.reshape(-1), load.shape[2]
    # (E, chunks of all sequences): choices of each chunk, and those of chunks before it.
    own, earlier = (
        counts[:, sorted({first, last})].reshape(-1, experts).T
        for counts in (load, load.cumsum(axis=1) - load)
    )
    order = flat.argsort(kind="stable")
    block = flat[order], _runs(len(flat), own.shape[1])[order]
    starts = own.cumsum().reshape(own.shape) - own
    sources = order[earlier[block] + np.arange(len(flat)) - starts[block] < capacity]
    places = np.full(len(flat), -1)
    places[sources] = np.arange(len(sources))
    ends = np.bincount(flat[sources], minlength=experts).cumsum()
    sources = np.pad(sources, (0, len(flat) - len(sources)))
    return places.reshape(chosen.shape), sources, ends


@operation("load@count_choices ends@permute tally<V:2,H -> tally", "nothing")
def add_load(load, ends, tally, arena):
    """Add to a tally: for each expert the choices of tokens, and those that it took.

    load: (B, chunks, E); ends: (E,); tally: (2, E) int64
    """
    tally[0] += load.sum(axis=(0, 1))
    tally[1] += np.diff(ends, prepend=0)


@operation("x:M,C sources<M:M k=1 -> rows:M,C", "rows")
def dispatch(x, sources, k, arena, weights=None):
    """Return rows[r] = x[sources[r] // k], times weights.flat[sources[r]] if there are weights.

    x: (M, C); sources: (R,); weights: (M, k); rows: (R, C)
    """
    rows = x[sources // k]
    return rows if weights is None else rows * weights.reshape(-1)[sources, None]


@operation("rows:M,C places<M!:M,1 weights:M,1 -> y:M,C saved", "y")
def combine(rows, places, weights, arena, out=None):
    """Return (y, saved) with y[m] the sum over j of weights[m, j] rows[places[m, j]].

    A place below 0 counts as a row of zeros. Without weights (None), all are 1.
    rows: (R, C); places: (M, k); weights: (M, k); y: (M, C)
    """
    taken = _taken(rows, places)
    y = taken.sum(axis=1) if weights is None else (taken * weights[..., None]).sum(axis=1)
    return into(out, y), (rows, places, weights)


@operation("dy:M,C saved@combine -> dweights:M,1", "nothing")
def combine_backward(dy, saved, arena, out=None):
    """Return the gradient of the weights; that of the rows is a `dispatch` of dy with weights.

    dy: (M, C); dweights: (M, k)
    """
    rows, places, _ = saved
    return into(out, (_taken(rows, places) * dy[:, None]).sum(axis=2))


@operation("x:2BT,K w:H,N,K ends@permute -> y:2BT,N saved", "y", products="2BTNK")
def grouped_linear(x, w, ends, arena):
    """Return (y, saved): the rows of each expert times its matrix; rows behind the last expert's are 0.

    x: (R, K); w: (E, N, K); ends: (E,), ascending, at most R; y: (R, N)
    """
    y = np.zeros((len(x), w.shape[1]), x.dtype)
    for part, matrix in zip(parts(ends), w, strict=True):
        y[part] = x[part] @ matrix.T
    return y, (x, ends)


@operation("dy:2BT,N w:H,N,K saved@grouped_linear -> dx:2BT,K pending", "dx", products="2BTNK")
def grouped_linear_backward_input(dy, w, saved, arena):
    """Return (dx, pending), the input half of the backward of `grouped_linear`.

    dy: (R, N); w: (E, N, K); dx: (R, K), 0 behind the last expert's rows
    """
    x, ends = saved
    dx = np.zeros(x.shape, dy.dtype)
    for part, matrix in zip(parts(ends), w, strict=True):
        dx[part] = dy[part] @ matrix
    return dx, (dy, x, ends)


@operation(
    "pending@grouped_linear_backward_input|2BT,N+2BT,K dw:H,N,K accumulate=1 -> dw",
    "nothing",
    products="2BTNK",
)
def grouped_linear_backward_weight(pending, dw, accumulate, arena):
    """Write or add the gradient of each matrix: that of an expert without rows is 0.    dw: (E, N, K)"""
    dy, x, ends = pending
    for part, matrix in zip(parts(ends), dw, strict=True):
        put(dy[part].T @ x[part], matrix, accumulate)


def parts(ends):
    """Return the rows of each expert, as slices."""
    return [slice(*run) for run in pairwise([0, *ends])]


def _taken(rows, places):
    taken = np.zeros((*places.shape, rows.shape[1]), rows.dtype)
    taken[places >= 0] = rows[places[places >= 0]]
    return taken


def _softmax(logits):
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def _runs(count, runs):
    """Return the number of the run of each of `count` elements that follow each other."""
    return np.arange(count) // max(1, count // max(1, runs))
