"""A mixture of experts on kernels; numbers of rows stay on the device.

So buffers have the rows of all choices, and no launch waits for the router. Weights of choices have the
dtype of sums, since the router is never in half precision.
"""

from typing import Any

from mpitrain.kernels.loader import Macros
from mpitrain.ops.cuda.launches import KINDS, ROWS, ByDtypes, by_rows, element, result, row_blocks

WEIGHTED = ByDtypes(lambda x, weights: element(x) | result(weights, x))
"""Macros by the dtypes of (rows, what is stored as Result)."""
COUNTS = Macros(Element="float", Sum="float")  # kernels of integers alone


def score(kernels, x, w, arena):
    y = arena.take((len(x), len(w)), KINDS[x.dtype].sums)
    kernels.multiply(arena, x, w, y, transposed_b=True)
    return y, x


def choose(kernels, logits, k, before, arena):
    kind, (rows, experts) = KINDS[logits.dtype], logits.shape
    weights, chosen = arena.take((rows, k), kind.sums), arena.take((rows, k), "int64")
    by_rows(
        kernels,
        "choose",
        (rows, experts, k, before, logits, weights, chosen),
        kind.macros,
        fresh="weights chosen",
    )
    return weights, chosen, (logits, weights, chosen)


def choose_backward(kernels, dweights, saved, load, weight, balance, z, before, dlogits, arena):
    logits, weights, _ = saved
    (rows, experts), tokens = logits.shape, len(logits) // max(1, len(load))
    by_rows(
        kernels,
        "choose_backward",
        (
            *(rows, tokens, experts, weights.shape[1], before, load.shape[1], balance, z),
            *(*saved, dweights, load, weight, dlogits),
        ),
        WEIGHTED[logits.dtype, dlogits.dtype],
        fresh="dlogits",
    )


def count_choices(kernels, chosen, experts, sequences, chunks, arena):
    load = arena.take((sequences, chunks, experts), "int64")
    runs = sequences * chunks
    arguments = runs, experts, chosen.size // max(1, runs), chosen, load
    _of_integers(kernels, "count_choices", row_blocks(runs * experts), arguments, "load")
    return load


def permute(kernels, chosen, load, first, last, capacity, arena):
    (sequences, chunks, experts), own = load.shape, 1 + (first < last)
    runs = sequences * own
    places, sources = arena.take(chosen.shape, "int64"), arena.take((chosen.size,), "int64")
    ends, takes = arena.take((experts,), "int64"), arena.take((2, runs, experts), "int32")
    starts = sequences, chunks, experts, own, first, last, capacity, load, takes, ends
    _of_integers(kernels, "start_experts", (1,), starts, "takes ends", threads=(32,))
    moves = runs, experts, chosen.size // max(1, runs), chosen, takes, ends, places, sources
    _of_integers(kernels, "permute", row_blocks(runs * experts), moves, "places sources")
    return places, sources, ends


def add_load(kernels, load, ends, tally, arena):
    sequences, chunks, experts = load.shape
    arguments = sequences * chunks, experts, load, ends, tally
    _of_integers(kernels, "add_load", (-(-experts // ROWS[0]),), arguments)


def _of_integers(kernels, name, grid, arguments, fresh="", threads=ROWS):
    kernels.launch(name, grid, threads, arguments, macros=COUNTS, fresh=fresh)


def dispatch(kernels, x, sources, k, arena, weights=None):
    rows = arena.take((len(sources), x.shape[1]), x.dtype)
    arguments = *rows.shape, k, x, sources, weights, rows
    by_rows(kernels, "dispatch", arguments, _weighted(x, weights), fresh="rows")
    return rows


def combine(kernels, rows, places, weights, arena, out=None):
    tokens, k = places.shape
    y = arena.take((tokens, rows.shape[1]), rows.dtype) if out is None else out
    arguments = tokens, rows.shape[1], k, rows, places, weights, y
    by_rows(kernels, "combine", arguments, _weighted(rows, weights), fresh="y")
    return y, (rows, places, weights)


def combine_backward(kernels, dy, saved, arena, out=None):
    rows, places, weights = saved
    dweights = arena.take(places.shape, weights.dtype) if out is None else out
    arguments = *dy.shape, places.shape[1], dy, rows, places, dweights
    by_rows(kernels, "combine_backward", arguments, _weighted(rows, weights), fresh="dweights")
    return dweights


def _weighted(rows: Any, weights: Any) -> Macros:
    return WEIGHTED[rows.dtype, (rows if weights is None else weights).dtype]


def grouped_linear(kernels, x, w, ends, arena):
    y = arena.take((len(x), w.shape[1]), x.dtype)
    kernels.multiply(arena, x, w, y, transposed_b=True, ends=ends)
    return y, (x, ends)


def grouped_linear_backward_input(kernels, dy, w, saved, arena):
    x, ends = saved
    dx = arena.take(x.shape, dy.dtype)
    kernels.multiply(arena, dy, w, dx, ends=ends)
    return dx, (dy, x, ends)


def grouped_linear_backward_weight(kernels, pending, dw, accumulate, arena):
    dy, x, ends = pending
    kernels.multiply(arena, dy, x, dw, transposed_a=True, beta=float(accumulate), ends=ends)
