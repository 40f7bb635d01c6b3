"""Causal attention in tiles, one head at a time (FlashAttention-2, Dao 2023).

A tile of scores stays in the L2 cache, and no array has T x T elements. Tiles above the diagonal
are never computed. Every array of a head is scratch, which all heads use in turn. So the views of
all tiles are made once per call.

Two products each take one more channel, which saves a pass over the tiles. It adds -shift to the
scores, or -dot to the gradient of the weights.

B batch, T tokens, C channels, H heads, D = C / H; Q queries and K keys of a tile.
"""

from typing import NamedTuple

import numpy as np

from mpitrain.ops.host.attention_whole import SAFE, split_heads


class Tile(NamedTuple):
    """The largest sizes of a tile.

    short  queries of the forward, keys of the backward: the dim whose results are accumulated
    long   keys of the forward, queries of the backward
    """

    short: int
    long: int


# OpenBLAS multiplies without packing up to this many multiplications.
UNPACKED = 1_000_000
# Elements between two rows of a transposed operand. Without them, the rows of a tile would share
# few sets of the L1 cache where T is a power of 2.
GAP = 16


def tile_for(width):
    """Return the tile with the fastest products, for heads of this width."""
    return Tile(64, min(512, max(64, UNPACKED // (64 * (width + 1)) // 32 * 32)))


class Saved(NamedTuple):
    """The state for the backward: one number per row instead of a row of weights.

    qkv: (B, T, 3C); y: (B, T, C); log_sums: (B, H, T)
    """

    qkv: np.ndarray
    y: np.ndarray
    log_sums: np.ndarray
    tile: Tile

    def backward(self, dy, arena):
        """Return dqkv.    dy: (B, T, C); dqkv: (B, T, 3C)"""
        return _backward(dy, self, arena)


class Forward(NamedTuple):
    """Views of one tile of the forward.

    q: (Q, D + 1); kt: (D + 1, K); v: (K, D); scores: (Q, K); sums: (Q,); out, part: (Q, D)
    masked, mask  the columns of the scores from the diagonal on, and 0 or -inf for each
    ones          (K,)
    is_first      whether this tile has the first keys of its queries
    """

    q: np.ndarray
    kt: np.ndarray
    v: np.ndarray
    scores: np.ndarray
    masked: np.ndarray
    mask: np.ndarray
    ones: np.ndarray
    is_first: bool
    out: np.ndarray
    part: np.ndarray
    sums: np.ndarray
    part_sums: np.ndarray


def attention(qkv, heads, arena, tile=None):
    """Return (y, saved).    qkv: (B, T, 3C); y: (B, T, C)"""
    batch, length, packed = qkv.shape
    width, dtype = packed // 3 // heads, qkv.dtype
    tile = tile or tile_for(width)
    y = arena.take((batch, length, packed // 3), dtype)
    log_sums = arena.take((batch, heads, length), dtype)
    q, kt = (
        arena.take((length, width + 1), dtype),
        _take_columns(1, width + 1, length, dtype, arena)[0],
    )
    v, out = arena.take((2, length, width), dtype)
    sums = arena.take((length,), dtype)
    tiles = _forward_tiles(q, kt, v, out, sums, tile, arena)
    kt[width] = 1
    for sequence in range(batch):
        every_q, every_k, every_v = split_heads(qkv[sequence], 3, heads)
        (every_y,) = split_heads(y[sequence], 1, heads)
        for head in range(heads):
            np.multiply(every_q[head], width**-0.5, out=q[:, :width])
            q[:, width] = 0
            kt[:width] = every_k[head].T
            v[...] = every_v[head]
            with np.errstate(over="ignore", invalid="ignore"):
                _sum_values(tiles)
            if not (SAFE[0] < sums.min(initial=1) and sums.max(initial=1) < SAFE[1]):
                # A softmax does not depend on a shift of its scores. NumPy takes almost as long for
                # the row maxima as for the exponentials, so only such a head has them.
                np.multiply(_row_maxima(tiles, sums), -1, out=q[:, width])
                _sum_values(tiles)
            np.divide(out, sums[:, None], out=every_y[head])
            np.log(sums, out=sums)
            np.subtract(sums, q[:, width], out=log_sums[sequence, head])
    return y, Saved(qkv, y, log_sums, tile)


def _forward_tiles(q, kt, v, out, sums, tile, arena):
    """Return the views of all tiles of a head, in the order of their queries."""
    length, dtype = len(q), q.dtype
    short, long = min(tile.short, length), min(tile.long, length)
    scores, part = arena.take((short * long,), dtype), arena.take((short, v.shape[1]), dtype)
    part_sums, ones = arena.take((short,), dtype), np.ones(long, dtype)
    mask, found = _mask(short, dtype), []
    for first in range(0, length, short):
        rows = slice(first, min(first + short, length))
        count = rows.stop - first
        for start in range(0, rows.stop, long):
            keys = slice(start, min(start + long, rows.stop))
            own = scores[: count * (keys.stop - start)].reshape(count, -1)
            late = max(first, start)
            found.append(
                Forward(
                    q[rows],
                    kt[:, keys],
                    v[keys],
                    own,
                    own[:, late - start :],
                    mask[:count, late - first : max(0, keys.stop - first)],
                    ones[: keys.stop - start],
                    start == 0,
                    out[rows],
                    part[:count],
                    sums[rows],
                    part_sums[:count],
                )
            )
    return found


def _sum_values(tiles):
    """Fill the sums with the row sums of exp(scores), and out with exp(scores) v."""
    for t in tiles:
        np.matmul(t.q, t.kt, out=t.scores)
        if t.mask.size:
            np.add(t.masked, t.mask, out=t.masked)
        np.exp(t.scores, out=t.scores)
        if t.is_first:
            np.matmul(t.scores, t.ones, out=t.sums)
            np.matmul(t.scores, t.v, out=t.out)
        else:
            np.add(t.sums, np.matmul(t.scores, t.ones, out=t.part_sums), out=t.sums)
            np.add(t.out, np.matmul(t.scores, t.v, out=t.part), out=t.out)


def _row_maxima(tiles, maxima):
    """Fill the maxima (T,), which are the tiles' sums, with the largest score of each row."""
    maxima.fill(-np.inf)
    for t in tiles:
        np.matmul(t.q, t.kt, out=t.scores)
        if t.mask.size:
            np.add(t.masked, t.mask, out=t.masked)
        np.maximum(t.sums, t.scores.max(1), out=t.sums)
    return maxima


class Backward(NamedTuple):
    """Views of one tile of the backward.

    q, d: (Q, D + 1); kt, vt: (D + 1, K); k: (K, D); weights, dscores: (Q, K)
    only_q, only_d  without the additional channel: (Q, D)
    masked, mask    the rows of the weights that see only some keys, and 0 or -inf for each element
    dq, part_q      (Q, D)
    dk, dv, part_k  (K, D)
    is_first        whether this tile has the first queries that see its keys
    """

    q: np.ndarray
    d: np.ndarray
    only_q: np.ndarray
    only_d: np.ndarray
    kt: np.ndarray
    vt: np.ndarray
    k: np.ndarray
    weights: np.ndarray
    dscores: np.ndarray
    masked: np.ndarray
    mask: np.ndarray
    is_first: bool
    dq: np.ndarray
    part_q: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    part_k: np.ndarray


def _backward(dy, saved, arena):
    """Return dqkv; the weights are computed again, tile by tile."""
    qkv, y, log_sums, tile = saved
    batch, heads, length = log_sums.shape
    width, dtype = dy.shape[2] // heads, qkv.dtype
    scale = width**-0.5
    dqkv = arena.take(qkv.shape, dtype)
    q, d = arena.take((2, length, width + 1), dtype)
    kt, vt = _take_columns(2, width + 1, length, dtype, arena)
    k, dq, dk, dv = arena.take((4, length, width), dtype)
    tiles = _backward_tiles(q, d, kt, vt, k, dq, dk, dv, tile, arena)
    kt[width] = vt[width] = 1
    for sequence in range(batch):
        every_q, every_k, every_v = split_heads(qkv[sequence], 3, heads)
        every_dq, every_dk, every_dv = split_heads(dqkv[sequence], 3, heads)
        (every_y,), (every_d,) = (split_heads(one[sequence], 1, heads) for one in (y, dy))
        for head in range(heads):
            np.multiply(every_q[head], scale, out=q[:, :width])
            np.multiply(log_sums[sequence, head], -1, out=q[:, width])
            d[:, :width] = every_d[head]
            np.vecdot(every_d[head], every_y[head], out=d[:, width])
            # np.negative of NumPy 2.4 computes in place with some strides wrongly.
            d[:, width] *= -1
            kt[:width], vt[:width] = every_k[head].T, every_v[head].T
            k[...] = every_k[head]
            dq.fill(0)
            _add_gradients(tiles)
            np.multiply(dq, scale, out=every_dq[head])
            every_dk[head], every_dv[head] = dk, dv
    return dqkv


def _backward_tiles(q, d, kt, vt, k, dq, dk, dv, tile, arena):
    """Return the views of all tiles of a head, in the order of their keys."""
    (length, width), dtype = k.shape, k.dtype
    short, long = min(tile.short, length), min(tile.long, length)
    weights, dscores = arena.take((2, short * long), dtype)
    part = arena.take((long, width), dtype)
    mask, found = _mask(short, dtype), []
    for first in range(0, length, short):
        keys = slice(first, min(first + short, length))
        count = keys.stop - first
        for start in range(first, length, long):
            rows = slice(start, min(start + long, length))
            shape, size = (rows.stop - start, count), (rows.stop - start) * count
            own = weights[:size].reshape(shape)
            late = count if start == first else 0
            found.append(
                Backward(
                    q[rows],
                    d[rows],
                    q[rows, :width],
                    d[rows, :width],
                    kt[:, keys],
                    vt[:, keys],
                    k[keys],
                    own,
                    dscores[:size].reshape(shape),
                    own[:late],
                    mask[:late, :count],
                    start == first,
                    dq[rows],
                    part[: rows.stop - start],
                    dk[keys],
                    dv[keys],
                    part[:count],
                )
            )
    return found


def _add_gradients(tiles):
    """Add every tile's gradient to dq, which is 0 at first; write or add those of dk and dv."""
    for t in tiles:
        np.matmul(t.q, t.kt, out=t.weights)
        if t.mask.size:
            np.add(t.masked, t.mask, out=t.masked)
        np.exp(t.weights, out=t.weights)
        np.matmul(t.d, t.vt, out=t.dscores)
        np.multiply(t.dscores, t.weights, out=t.dscores)
        if t.is_first:
            np.matmul(t.weights.T, t.only_d, out=t.dv)
            np.matmul(t.dscores.T, t.only_q, out=t.dk)
        else:
            np.add(t.dv, np.matmul(t.weights.T, t.only_d, out=t.part_k), out=t.dv)
            np.add(t.dk, np.matmul(t.dscores.T, t.only_q, out=t.part_k), out=t.dk)
        np.add(t.dq, np.matmul(t.dscores, t.k, out=t.part_q), out=t.dq)


def _take_columns(count, rows, columns, dtype, arena):
    """Lease arrays (count, rows, columns) with a gap after each row."""
    return arena.take((count, rows, columns + GAP), dtype)[:, :, :columns]


def _mask(count, dtype):
    """Return 0 on and below the diagonal of (count, count), and -inf above it."""
    return np.triu(np.full((count, count), -np.inf, dtype), 1)
