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
    (rows, experts), tokens = logits.shape, len(logits) // max(1, load.shape[1])
    by_rows(
        kernels,
        "choose_backward",
        (
            *(rows, tokens, experts, weights.shape[1], before, len(load), balance, z),
            *(*saved, dweights, load, weight, dlogits),
        ),
        WEIGHTED[logits.dtype, dlogits.dtype],
        fresh="dlogits",
    )


def permute(kernels, chosen, experts, sequences, capacity, arena):
    size = chosen.size // max(1, sequences)
    places, sources = arena.take(chosen.shape, "int64"), arena.take((chosen.size,), "int64")
    load, ends = arena.take((sequences, experts), "int64"), arena.take((experts,), "int64")
    firsts = arena.take((sequences, experts), "int32")
    grid, sizes = row_blocks(sequences * experts), (sequences, experts)
    for name, threads, arguments, fresh in (
        ("count_choices", ROWS, (*sizes, size, chosen, load), "load"),
        ("start_experts", (32,), (*sizes, capacity, load, firsts, ends), "firsts ends"),
        (
            "permute",
            ROWS,
            (*sizes, size, capacity, chosen, firsts, ends, places, sources),
            "places sources",
        ),
    ):
        here = (1,) if name == "start_experts" else grid
        kernels.launch(name, here, threads, arguments, macros=COUNTS, fresh=fresh)
    return places, sources, load, ends


def add_load(kernels, load, ends, tally, arena):
    sequences, experts = load.shape
    grid = (-(-experts // ROWS[0]),)
    kernels.launch("add_load", grid, ROWS, (sequences, experts, load, ends, tally), macros=COUNTS)


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
