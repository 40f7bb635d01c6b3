"""Cutting arrays into blocks that stay in cache, and sums that BLAS computes."""

from collections.abc import Iterator

import numpy as np

L2_SHARE = (
    256 * 1024
)  # bytes of one array in a block; a chain of operations keeps four or five of them in L2


def row_blocks(x: np.ndarray, nbytes: int = L2_SHARE) -> Iterator[slice]:
    """Slices of the first dim of `x` that cover it, each of about `nbytes` and of one row at least."""
    if x.size == 0:
        return
    rows = max(1, nbytes // (x.nbytes // len(x)))
    for start in range(0, len(x), rows):
        yield slice(start, min(start + rows, len(x)))


def block_shape(x: np.ndarray, nbytes: int = L2_SHARE) -> tuple[int, ...]:
    """Shape of the largest block that `row_blocks` makes: what a scratch array for one block needs."""
    return x[next(row_blocks(x, nbytes), slice(0))].shape


def sum_rows(x, out, accumulate, arena):
    """Write or add the sum over rows of x (M, N) to out (N,), as a product with ones: BLAS reads x once."""
    total = out if not accumulate else arena.take(out.shape, out.dtype)
    np.matmul(np.ones(len(x), x.dtype), x, out=total)
    if accumulate:
        out += total
