"""Token and position embedding. B batch, T tokens, C channels, V vocabulary; `saved` holds the tokens."""

import numpy as np

from mpitrain.errors import DataError
from mpitrain.ops.host.blocks import sum_rows


def embedding(tokens, table, positions, arena):
    """tokens: (B, T); table: (V, C); positions: (T or more, C); x: (B, T, C)"""
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < len(table):
        law = f"tokens must lie in 0 .. {len(table) - 1}, but here they reach from {tokens.min()} to {tokens.max()}."
        raise DataError(law, "Train with the vocabulary that the data was written with.")
    x = arena.take((*tokens.shape, table.shape[1]), table.dtype)
    np.take(table, tokens, axis=0, out=x, mode="clip")  # the default mode would copy through a buffer
    x += positions[:tokens.shape[1]]
    return x, tokens


def embedding_backward_table(dx, saved, dtable, accumulate, arena):
    """Rows sorted by token are summed run by run, so that no token is written twice.    dx: (B, T, C); dtable: (V, C)"""
    if not accumulate:
        dtable.fill(0)
    if saved.size == 0:
        return
    tokens = saved.reshape(-1)
    order = tokens.argsort(kind="stable")
    tokens = tokens[order]
    starts = np.flatnonzero(np.diff(tokens, prepend=tokens[0] - 1))
    rows = arena.take((len(order), dx.shape[-1]), dx.dtype)
    np.take(dx.reshape(rows.shape), order, axis=0, out=rows, mode="clip")
    # As long as it can become: a length that changed from step to step would be a new buffer each time.
    sums = np.add.reduceat(rows, starts, axis=0, out=arena.take(rows.shape, dx.dtype)[:len(starts)])
    dtable[tokens[starts]] += sums


def embedding_backward_positions(dx, dpositions, accumulate, arena):
    """dx: (B, T, C); dpositions: (T or more, C)"""
    batch, length, _ = dx.shape
    if not accumulate:
        dpositions[length:] = 0
    sum_rows(dx.reshape(batch, -1), dpositions[:length].reshape(-1), accumulate, arena)
