"""Token and position embedding. B batch, T tokens, C channels, V rows of the table.

`saved` is each token's row in the table; a row outside 0 to V - 1 is another slice's.
"""

import numpy as np

from mpitrain.ops.host.blocks import sum_rows


def embedding(tokens, table, positions, arena, first=0, out=None):
    """Return (x, rows).

    tokens: (B, T); table: (V, C); positions: (T or more, C) or None; x: (B, T, C)
    """
    rows = tokens - first
    x = arena.take((*tokens.shape, table.shape[1]), table.dtype) if out is None else out
    if len(table):
        # The default mode would copy through a buffer.
        np.take(table, rows, axis=0, out=x, mode="clip")
    x[(rows < 0) | (rows >= len(table))] = 0
    if positions is not None:
        x += positions[: tokens.shape[1]]
    return x, rows


def embedding_backward_table(dx, saved, dtable, accumulate, arena):
    """Sort dx by table row and sum each run of equal rows, so that no row is written twice.

    dx: (B, T, C); dtable: (V, C)
    """
    if not accumulate:
        dtable.fill(0)
    rows = saved.reshape(-1)
    order = rows.argsort(kind="stable")
    # Only rows of this table remain.
    order = order[slice(*np.searchsorted(rows, (0, len(dtable)), sorter=order))]
    if not len(order):
        return
    rows = rows[order]
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    # The buffers have their largest possible length. A length that changed at every step would take
    # a new buffer each time.
    sorted_dx, sums = (arena.take((saved.size, dx.shape[-1]), dx.dtype) for _ in range(2))
    sorted_dx = np.take(
        dx.reshape(sorted_dx.shape), order, axis=0, out=sorted_dx[: len(order)], mode="clip"
    )
    dtable[rows[starts]] += np.add.reduceat(sorted_dx, starts, axis=0, out=sums[: len(starts)])


def embedding_backward_positions(dx, dpositions, accumulate, arena):
    """Write or add the sum over the batch.    dx: (B, T, C); dpositions: (T or more, C)"""
    batch, length, width = dx.shape
    if not accumulate:
        dpositions[length:] = 0
    sum_rows(dx.reshape(batch, length * width), dpositions[:length].reshape(-1), accumulate, arena)
