"""Blocks of arrays that stay in cache, and sums that BLAS computes."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpitrain.machine.backend import has_memory

# Bytes of one array in a block: a chain of operations needs four or five arrays in L2.
L2_SHARE = 256 * 1024
# OpenBLAS multiplies without packing up to this many multiplications.
UNPACKED = 1_000_000
# Elements between two rows of a transposed operand. Rows whose length is a power of 2 would share
# few sets of the L1 cache.
GAP = 16


class TileLimits(NamedTuple):
    """The largest sizes of a tile of attention; `long` is at least `short`.

    short  queries of the forward, keys of the backward: their results are sums over tiles
    long   keys of the forward, queries of the backward
    """

    short: int
    long: int


def tile_for(width: int) -> TileLimits:
    """Return the tile with the fastest products, for heads of this width."""
    return TileLimits(64, min(512, max(64, UNPACKED // (64 * (width + 1)) // 32 * 32)))


def take_columns(count, rows, columns, dtype, arena):
    """Lease arrays (count, rows, columns) with a gap after each row."""
    return arena.take((count, rows, columns + GAP), dtype)[:, :, :columns]


def rounds(count: int, like: np.ndarray) -> range:
    """Return the rounds of a loop: `count`, but two at most if the arrays have no memory."""
    return rounds_of(range(count), like)


def rounds_of(starts: range, like: np.ndarray) -> range:
    """Return the starts of the rounds of a loop, but two at most if the arrays have no memory.

    Without memory only leases matter: every round after the second leases the same as the second.
    """
    return starts if has_memory(like) else starts[:2]


def row_blocks(x: np.ndarray, nbytes: int = L2_SHARE) -> Iterator[slice]:
    """Yield slices that cover the first dim of `x`, each of about `nbytes` and at least one row."""
    if x.size == 0:
        return
    if x.nbytes <= nbytes:
        yield slice(0, len(x))
        return
    rows = max(1, nbytes // (x.nbytes // len(x)))
    for number in rounds(-(-len(x) // rows), x):
        yield slice(number * rows, min((number + 1) * rows, len(x)))


@lru_cache(256)
def constant(count: int, value: float, dtype: np.dtype) -> np.ndarray:
    """Return a read-only vector of one value, (count,); micro-batches share it."""
    vector = np.full(count, value, dtype)
    vector.flags.writeable = False
    return vector


def blocks_of(x: np.ndarray, *others: Any, nbytes: int = L2_SHARE) -> Iterator[tuple[Any, ...]]:
    """Yield (block of x, block of each other array) for the blocks of rows that `row_blocks` makes.

    If there is one block, it has the arrays themselves, because views would cost more than they
    save. An argument None stays None.
    """
    if not x.size:
        return
    if x.nbytes <= nbytes:
        yield x, *others
        return
    for rows in row_blocks(x, nbytes):
        yield tuple([one if one is None else one[rows] for one in (x, *others)])


def block_shape(x: np.ndarray, nbytes: int = L2_SHARE) -> tuple[int, ...]:
    """Return the shape of the largest block of `row_blocks`, for a scratch array of one block."""
    if x.nbytes <= nbytes:
        return x.shape if x.size else (0, *x.shape[1:])
    return max(1, nbytes // (x.nbytes // len(x))), *x.shape[1:]


def sum_rows(x, out, accumulate, arena):
    """Write or add the sum over rows of x (M, N) to out (N,).

    The sum is a product with ones, in which BLAS reads x once.
    """
    if accumulate and len(x) == 1:
        out += x[0]
        return
    total = out if not accumulate else arena.take(out.shape, out.dtype)
    np.matmul(constant(len(x), 1, x.dtype), x, out=total)
    if accumulate:
        out += total
