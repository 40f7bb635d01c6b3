"""Causal attention in tiles, one head at a time (FlashAttention-2, Dao 2023).

A tile of scores stays in the L2 cache, and no array has T x T elements. Tiles above the diagonal
are never computed, nor are tiles whose keys all belong to earlier documents. Every array of a head
is scratch, which all heads use in turn. So the views of all tiles are made once per call.

The product of queries and keys takes one more channel, which adds -shift to the scores. This saves
a pass over the tiles.

B batch, T tokens, C channels, H heads, D = C / H. A tile has Q queries and K keys.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from mpitrain.ops.host.attention_tiled_backward import backward, visible
from mpitrain.ops.host.attention_whole import SAFE, causal_mask, hide, split_heads
from mpitrain.ops.host.blocks import TileLimits, constant, rounds, take_columns, tile_for
from mpitrain.ops.random_bits import AttentionMask


class TiledState(NamedTuple):
    """The state for the backward: one number per row instead of a row of weights.

    qkv: (B, T, 3C); y: (B, T, C); log_sums: (B, H, T); drop: masks of dropout, or None
    starts  (B, T) first token of each token's document, or None
    """

    qkv: np.ndarray
    y: np.ndarray
    log_sums: np.ndarray
    tile: TileLimits
    drop: AttentionMask | None
    starts: np.ndarray | None

    def backward(self, dy, arena):
        """Return dqkv.    dy: (B, T, C); dqkv: (B, T, 3C)"""
        return backward(dy, *self, arena)


class ForwardTile(NamedTuple):
    """Views of one tile of the forward.

    q: (Q, D + 1); kt: (D + 1, K); v: (K, D); scores: (Q, K); sums: (Q,); out, part: (Q, D)
    masked, mask  the columns of the scores from the diagonal on, and 0 or -inf for each
    ones          (K,)
    is_first      whether this tile has the first keys of its queries
    rows, keys    the queries and keys of this tile
    dropped          (Q, K): the weights after dropout; the scores if there is none
    firsts        (Q,) the column of the first visible key; None: there are no documents
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
    rows: slice
    keys: slice
    dropped: np.ndarray
    firsts: np.ndarray | None = None

    def within(self, firsts, is_first):
        """Return the tile without the keys before the first query's document."""
        cut = max(0, firsts[0])
        return self._replace(
            kt=self.kt[:, cut:],
            v=self.v[cut:],
            scores=self.scores[:, cut:],
            ones=self.ones[cut:],
            is_first=is_first,
            keys=slice(self.keys.start + cut, self.keys.stop),
            dropped=self.dropped[:, cut:],
            firsts=firsts - cut,
        )


def attention(qkv, heads, arena, starts=None, tile=None):
    """Return (y, saved).    qkv: (B, T, 3C); y: (B, T, C); starts: (B, T) or None"""
    return attended(qkv, heads, None, arena, starts, tile)


def attended(qkv, heads, drop, arena, starts=None, tile=None):
    """Return (y, saved).    qkv: (B, T, 3C); y: (B, T, C); drop: masks of dropout, or None"""
    batch, length, packed = qkv.shape
    width, dtype = packed // 3 // heads, qkv.dtype
    tile = tile or tile_for(width)
    y = arena.take((batch, length, packed // 3), dtype)
    log_sums = arena.take((batch, heads, length), dtype)
    q, kt = (
        arena.take((length, width + 1), dtype),
        take_columns(1, width + 1, length, dtype, arena)[0],
    )
    v, out = arena.take((2, length, width), dtype)
    sums = arena.take((length,), dtype)
    every = tiles = _forward_tiles(q, kt, v, out, sums, tile, arena, drop is not None)
    kt[width] = 1
    inputs, (ys,) = split_heads(qkv, 3, heads), split_heads(y, 1, heads)
    for sequence in rounds(batch, qkv):
        (every_q, every_k, every_v), every_y = inputs[:, sequence], ys[sequence]
        if starts is not None:
            tiles = visible(every, starts[sequence])
        for head in rounds(heads, qkv):
            np.multiply(every_q[head], width**-0.5, out=q[:, :width])
            q[:, width] = 0
            kt[:width] = every_k[head].T
            v[...] = every_v[head]
            fill = partial(drop.fill, sequence, head) if drop else None
            with np.errstate(over="ignore", invalid="ignore"):
                _sum_values(tiles, fill)
            if not (SAFE[0] < sums.min(initial=1) and sums.max(initial=1) < SAFE[1]):
                # A softmax does not depend on a shift of its scores. NumPy takes almost as long for
                # the row maxima as for the exponentials. So only such a head has a shift.
                np.multiply(_row_maxima(tiles, sums), -1, out=q[:, width])
                _sum_values(tiles, fill)
            np.divide(out, sums[:, None], out=every_y[head])
            np.log(sums, out=sums)
            np.subtract(sums, q[:, width], out=log_sums[sequence, head])
    return y, TiledState(qkv, y, log_sums, tile, drop, starts)


def _forward_tiles(q, kt, v, out, sums, tile, arena, drops):
    """Return the views of all tiles of a head, in the order of their queries."""
    length, dtype = len(q), q.dtype
    short, long = min(tile.short, length), min(tile.long, length)
    scores, part = arena.take((short * long,), dtype), arena.take((short, v.shape[1]), dtype)
    part_sums, ones = arena.take((short,), dtype), constant(long, 1, dtype)
    dropped = arena.take((short * long,), dtype) if drops else scores
    mask, tiles = causal_mask(short, dtype), []
    for first in range(0, length, short):
        rows = slice(first, min(first + short, length))
        count = rows.stop - first
        for start in range(0, rows.stop, long):
            keys = slice(start, min(start + long, rows.stop))
            own = scores[: count * (keys.stop - start)].reshape(count, -1)
            late = max(first, start)
            tiles.append(
                ForwardTile(
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
                    rows,
                    keys,
                    dropped[: own.size].reshape(own.shape),
                )
            )
    return tiles


def _sum_values(tiles, fill):
    """Fill the sums with the row sums of exp(scores), and out with exp(scores) v.

    fill  (queries, keys, dropped): write the mask of dropout; None: there is no dropout
    """
    for t in tiles:
        np.matmul(t.q, t.kt, out=t.scores)
        if t.mask.size:
            np.add(t.masked, t.mask, out=t.masked)
        if t.firsts is not None:
            hide(t.scores, t.firsts)
        np.exp(t.scores, out=t.scores)
        if fill:
            fill(t.rows, t.keys, t.dropped)
            np.multiply(t.dropped, t.scores, out=t.dropped)
        if t.is_first:
            np.matmul(t.scores, t.ones, out=t.sums)
            np.matmul(t.dropped, t.v, out=t.out)
        else:
            np.add(t.sums, np.matmul(t.scores, t.ones, out=t.part_sums), out=t.sums)
            np.add(t.out, np.matmul(t.dropped, t.v, out=t.part), out=t.out)


def _row_maxima(tiles, maxima):
    """Fill the maxima (T,), which are the tiles' sums, with the largest score of each row."""
    maxima.fill(-np.inf)
    for t in tiles:
        np.matmul(t.q, t.kt, out=t.scores)
        if t.mask.size:
            np.add(t.masked, t.mask, out=t.masked)
        if t.firsts is not None:
            hide(t.scores, t.firsts)
        np.maximum(t.sums, t.scores.max(1), out=t.sums)
    return maxima
