"""Attention in tiles, one head at a time (FlashAttention-2, Dao 2023).

A tile of scores stays in the L2 cache, and no array has T x T elements. Tiles in which no query
sees a key are never computed: those above the diagonal, before a window, and between documents. Every array of a head
is scratch, which all heads use in turn. So the views of all tiles are made once per call.

Some products take one more channel, which saves a pass over the tiles. In the forward, it adds
-shift to the scores. In the backward (algorithm 2 of the paper), it adds -log_sum to the scores, so
that their exponentials are the weights, and -dot to the gradient of the weights, where dot is the
sum of dy y over a row.

B batch, T tokens, D channels of a head; H query heads share G heads of keys and values. A tile has
Q queries and K keys.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpitrain.ops.host.bounds import Bounds
from mpitrain.ops.host.passes import by_numpy, hide_others
from mpitrain.ops.host.product import SAFE, TileLimits, rounds, split_heads, take_columns, tile_for
from mpitrain.ops.random_bits import AttentionMask
from mpitrain.ops.reference.attention import CAUSAL, Seen


class TiledState(NamedTuple):
    """The state for the backward: one number per row instead of a row of weights.

    q, y: (B, T, H D); kv: (B, T, 2 G D); log_sums: (B, H, T); drop: masks of dropout, or None
    seen    which keys the queries see
    passes  `NUMPY` of passes.py, or those in C++
    """

    q: np.ndarray
    kv: np.ndarray
    y: np.ndarray
    log_sums: np.ndarray
    tile: TileLimits
    drop: AttentionMask | None
    seen: Seen
    passes: Any

    def backward(self, dy, dq, dkv, arena):
        backward(dy, *self, dq, dkv, arena)

    def of_part(self, q, kv, seen):
        """Return the state for some of the keys, and for the last queries."""
        first = self.y.shape[1] - q.shape[1]
        y, log_sums = self.y[:, first:], self.log_sums[..., first:]
        return self._replace(q=q, kv=kv, y=y, log_sums=log_sums, seen=seen)


def join(whole, part, arena):
    """Join a part to earlier ones, in place: y and the log sums of the last queries."""
    whole = whole.of_part(part.q, None, CAUSAL)
    batch, heads, count = part.log_sums.shape
    ours, theirs, both = arena.take((3, *part.log_sums.shape), part.log_sums.dtype)
    np.logaddexp(whole.log_sums, part.log_sums, out=both)
    shape = batch, count, heads, part.y.shape[2] // heads
    y, added = (each.y.reshape(shape) for each in (whole, part))
    for each, share, log_sums in ((y, ours, whole.log_sums), (added, theirs, part.log_sums)):
        np.exp(np.subtract(log_sums, both, out=share), out=share)
        np.multiply(each, share.swapaxes(1, 2)[..., None], out=each)
    np.add(y, added, out=y)
    whole.log_sums[...] = both


class ForwardTile(NamedTuple):
    """Views of one tile of the forward.

    q: (Q, D + 1); kt: (D + 1, K); v: (K, D); scores: (Q, K); sums: (Q,); out, part: (Q, D)
    is_first      whether this tile has the first keys of its queries
    rows, keys    the queries and keys of this tile
    dropped          (Q, K): the weights after dropout; the scores if there is none
    end           number of keys of the tile up to the diagonal of the first query, or less than 1
    cap           the soft-cap of scores; 0: there is none
    seen          the columns up to the diagonal that each query sees
    """

    q: np.ndarray
    kt: np.ndarray
    v: np.ndarray
    scores: np.ndarray
    is_first: bool
    out: np.ndarray
    part: np.ndarray
    sums: np.ndarray
    rows: slice
    keys: slice
    dropped: np.ndarray
    end: int
    cap: float
    seen: Bounds = Bounds(None, None)

    def within(self, seen, is_first):
        """Return the tile without keys before or after those that its queries see."""
        some = seen.span(self.keys.stop - self.keys.start)
        return self._replace(
            kt=self.kt[:, some],
            v=self.v[some],
            scores=self.scores[:, some],
            is_first=is_first,
            keys=slice(self.keys.start + some.start, self.keys.start + some.stop),
            dropped=self.dropped[:, some],
            end=self.end - some.start,
            seen=seen.after(some.start),
        )


def attended(queries, kv, heads, drop, arena, visible=CAUSAL, passes_of=by_numpy, tile=None):
    scale = visible.scale_of(queries.shape[2] // heads)
    bounds = Bounds.of(visible, *queries.shape[:2])
    (batch, count, columns), length, dtype = queries.shape, kv.shape[1], queries.dtype
    width = columns // heads
    groups = kv.shape[2] // (2 * width)
    tile = tile or tile_for(width)
    y = arena.take(queries.shape, dtype)
    passes = passes_of(y)
    log_sums = arena.take((batch, heads, count), dtype)
    q, kt = (
        arena.take((count, width + 1), dtype),
        take_columns(1, width + 1, length, dtype, arena)[0],
    )
    v, out = arena.take((length, width), dtype), arena.take((count, width), dtype)
    sums = arena.take((count,), dtype)
    every = tiles = _forward_tiles(q, kt, v, out, sums, tile, arena, drop is not None, visible)
    kt[width] = 1
    (every_q,), (ys,) = split_heads(queries, 1, heads), split_heads(y, 1, heads)
    every_kv = split_heads(kv, 2, groups)
    for sequence in rounds(range(batch), queries):
        own_q, (every_k, every_v), every_y = every_q[sequence], every_kv[:, sequence], ys[sequence]
        some = slice(None)
        if bounds.starts is not None:
            tiles = tiles_within(every, bounds.within(sequence))
            seeing = bounds.starts[sequence].searchsorted(length)
            some = slice(int(seeing))  # The rest sees no key.
            every_y[:, some.stop :], log_sums[sequence, :, some.stop :] = 0, -np.inf
        seen, seen_sums = out[some], sums[some]
        for head in rounds(range(heads), queries):
            np.multiply(own_q[head], scale, out=q[:, :width])
            q[:, width] = 0
            if head % (heads // groups) == 0:
                kt[:width] = every_k[head * groups // heads].T
                v[...] = every_v[head * groups // heads]
            fill = partial(drop.fill, sequence, head) if drop else None
            with np.errstate(over="ignore", invalid="ignore"):
                sum_values(tiles, fill, passes)
            if not (SAFE[0] < seen_sums.min(initial=1) and seen_sums.max(initial=1) < SAFE[1]):
                # A softmax does not depend on a shift of its scores. NumPy takes almost as long for
                # the row maxima as for the exponentials. So only such a head has a shift.
                np.multiply(_row_maxima(tiles, sums), -1, out=q[:, width])
                sum_values(tiles, fill, passes)
            np.divide(seen, seen_sums[:, None], out=every_y[head, some])
            np.log(seen_sums, out=seen_sums)
            np.subtract(seen_sums, q[some, width], out=log_sums[sequence, head, some])
    return y, TiledState(queries, kv, y, log_sums, tile, drop, visible, passes)


def _forward_tiles(q, kt, v, out, sums, tile, arena, drops, visible):
    """Return the views of all tiles of a head, in the order of their queries."""
    length, dtype, offset = len(v), q.dtype, visible.offset
    short, long = min(tile.short, len(q)), min(tile.long, length)
    scores, part = arena.take((short * long,), dtype), arena.take((short, v.shape[1]), dtype)
    dropped = arena.take((short * long,), dtype) if drops else scores
    tiles = []
    for first in rounds(range(0, len(q), short), q):
        rows = slice(first, min(first + short, len(q)))
        count, seen = rows.stop - first, min(rows.stop + offset, length)
        for start in rounds(range(0, seen, long), q):
            keys = slice(start, min(start + long, seen))
            own = scores[: count * (keys.stop - start)].reshape(count, -1)
            tiles.append(
                ForwardTile(
                    q[rows],
                    kt[:, keys],
                    v[keys],
                    own,
                    start == 0,
                    out[rows],
                    part[:count],
                    sums[rows],
                    rows,
                    keys,
                    dropped[: own.size].reshape(own.shape),
                    first + offset + 1 - start,
                    visible.cap,
                )
            )
    return tiles


def put_scores(t, out, slopes=None):
    """Write a tile's scores, with the additional channel.

    out     (Q, K)
    slopes  where to put those of a soft-cap, (Q, K)
    """
    if not t.cap:
        np.matmul(t.q, t.kt, out=out)
        return
    np.matmul(t.q[:, :-1], t.kt[:-1], out=out)
    put_capped(out, t.cap, slopes)
    np.add(out, t.q[:, -1:], out=out)


def put_capped(scores, cap, slopes=None):
    """Replace scores by cap tanh(scores / cap), and write the slopes of that."""
    np.multiply(scores, 1 / cap, out=scores)
    np.tanh(scores, out=scores)
    if slopes is not None:
        np.subtract(1, np.multiply(scores, scores, out=slopes), out=slopes)
    np.multiply(scores, cap, out=scores)


def sum_values(tiles, fill, passes):
    """Fill the sums with the row sums of exp(scores), and out with exp(scores) v.

    fill  (queries, keys, dropped): write the mask of dropout; None: there is no dropout
    """
    for t in tiles:
        put_scores(t, t.scores)
        if fill:
            fill(t.rows, t.keys, t.dropped)
        dropped = t.dropped if fill else None
        passes.weigh_tile(t.end, t.is_first, *t.seen, t.scores, dropped, t.sums)
        if t.is_first:
            np.matmul(t.dropped, t.v, out=t.out)
        else:
            np.add(t.out, np.matmul(t.dropped, t.v, out=t.part), out=t.out)


def _row_maxima(tiles, maxima):
    """Fill the maxima (T,), which are the tiles' sums, with the largest score of each row."""
    maxima.fill(-np.inf)
    for t in tiles:
        put_scores(t, t.scores)
        hide_others(t.end, t.seen.starts, t.seen.ends, t.scores)
        np.maximum(t.sums, t.scores.max(1), out=t.sums)
    return maxima


class BackwardTile(NamedTuple):
    """Views of one tile of the backward.

    q, d: (Q, D + 1); kt, vt: (D + 1, K); k: (K, D); weights, dscores: (Q, K)
    only_q, only_d  without the additional channel: (Q, D)
    dq, part_q      (Q, D)
    dk, dv, part_k  (K, D)
    is_first        whether this tile has the first queries that see its keys
    rows, keys      the queries and keys of this tile
    dropped            (Q, K): the weights after dropout; the weights if there is none
    minus_dots      (Q, 1), of dropout: -dot
    slopes          (Q, K), of a soft-cap; the weights if there is none
    end, cap, seen  as of a `ForwardTile`
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
    is_first: bool
    dq: np.ndarray
    part_q: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    part_k: np.ndarray
    rows: slice
    keys: slice
    dropped: np.ndarray
    minus_dots: np.ndarray
    slopes: np.ndarray
    end: int
    cap: float
    seen: Bounds = Bounds(None, None)

    def within(self, seen, is_first):
        """Return the tile without the first and last queries that see none of the keys."""
        start = 0 if seen.ends is None else int(seen.ends.searchsorted(0, "right"))
        some = slice(start, int(seen.starts.searchsorted(self.keys.stop - self.keys.start)))
        return self._replace(
            **{name: getattr(self, name)[some] for name in BY_QUERY},
            is_first=is_first,
            rows=slice(self.rows.start + some.start, self.rows.start + some.stop),
            end=self.end + some.start,
            seen=seen.within(some),
        )


BY_QUERY = (
    *("q", "d", "only_q", "only_d", "weights", "dscores"),
    *("dq", "part_q", "dropped", "minus_dots", "slopes"),
)
"""The arrays of a tile with a row for each query."""


def backward(dy, queries, kv, y, log_sums, tile, drop, visible, passes, dqueries, dkv, arena):
    offset, bounds = visible.offset, Bounds.of(visible, *queries.shape[:2])
    (batch, heads, count), length, dtype = log_sums.shape, kv.shape[1], queries.dtype
    width = dy.shape[2] // heads
    groups = kv.shape[2] // (2 * width)
    scale = visible.scale_of(width)
    q, d = arena.take((2, count, width + 1), dtype)
    kt, vt = take_columns(2, width + 1, length, dtype, arena)
    k, dk, dv = arena.take((3, length, width), dtype)
    dq = arena.take((count, width), dtype)
    # With dropout the mask comes between the product and -dot, so the channel is 0.
    minus_dots = arena.take((count, 1), dtype) if drop else d[:, width:]
    views = q, d, kt, vt, k, dq, dk, dv, minus_dots
    every = tiles = _backward_tiles(*views, tile, arena, drop is not None, visible)
    kt[width] = vt[width] = 1
    dk[count + offset :] = dv[count + offset :] = 0  # No query sees these keys.
    inputs, results = split_heads(kv, 2, groups), split_heads(dkv, 2, groups)
    (every_qs,), (every_dqs,) = split_heads(queries, 1, heads), split_heads(dqueries, 1, heads)
    (ys,), (ds,) = split_heads(y, 1, heads), split_heads(dy, 1, heads)
    for sequence in rounds(range(batch), dy):
        every_q, every_dq = every_qs[sequence], every_dqs[sequence]
        (every_k, every_v), (every_dk, every_dv) = inputs[:, sequence], results[:, sequence]
        every_y, every_d = ys[sequence], ds[sequence]
        if bounds.starts is not None:
            tiles = tiles_within(every, bounds.within(sequence))
            dk.fill(0)  # No query may see a key.
            dv.fill(0)
        for head in rounds(range(heads), dy):
            np.multiply(every_q[head], scale, out=q[:, :width])
            np.multiply(log_sums[sequence, head], -1, out=q[:, width])
            d[:, :width] = every_d[head]
            np.vecdot(every_d[head], every_y[head], out=minus_dots[:, 0])
            # np.negative of NumPy 2.4 computes in place with some strides wrongly.
            minus_dots *= -1
            if drop:
                d[:, width] = 0
            group, number = divmod(head, heads // groups)
            if number == 0:
                kt[:width], vt[:width] = every_k[group].T, every_v[group].T
                k[...] = every_k[group]
            dq.fill(0)
            fill = partial(drop.fill, sequence, head) if drop else None
            add_gradients(tiles, fill, passes)
            np.multiply(dq, scale, out=every_dq[head])
            if number == 0:
                every_dk[group], every_dv[group] = dk, dv
            else:
                every_dk[group] += dk
                every_dv[group] += dv


def _backward_tiles(q, d, kt, vt, k, dq, dk, dv, minus_dots, tile, arena, drops, visible):
    """Return the views of all tiles of a head, in the order of their keys."""
    (length, width), dtype, offset, cap = k.shape, k.dtype, visible.offset, visible.cap
    short, long = min(tile.short, length), min(tile.long, len(q))
    weights, dscores = arena.take((2, short * long), dtype)
    dropped = arena.take((short * long,), dtype) if drops else weights
    slopes = arena.take((short * long,), dtype) if cap else weights
    part = arena.take((max(short, long), width), dtype)
    tiles = []
    for first in rounds(range(0, length, short), q):
        keys = slice(first, min(first + short, length))
        count = keys.stop - first
        for start in rounds(range(max(0, first - offset), len(q), long), q):
            rows = slice(start, min(start + long, len(q)))
            shape, size = (rows.stop - start, count), (rows.stop - start) * count
            own = weights[:size].reshape(shape)
            tiles.append(
                BackwardTile(
                    q[rows],
                    d[rows],
                    q[rows, :width],
                    d[rows, :width],
                    kt[:, keys],
                    vt[:, keys],
                    k[keys],
                    own,
                    dscores[:size].reshape(shape),
                    start == max(0, first - offset),
                    dq[rows],
                    part[: rows.stop - start],
                    dk[keys],
                    dv[keys],
                    part[:count],
                    rows,
                    keys,
                    dropped[:size].reshape(shape),
                    minus_dots[rows],
                    slopes[:size].reshape(shape),
                    start + offset + 1 - first,
                    cap,
                )
            )
    return tiles


def add_gradients(tiles, fill, passes):
    """Add every tile's gradient to dq, which is 0 at first; write or add those of dk and dv.

    fill  (queries, keys, dropped): write the mask of dropout; None: there is no dropout
    """
    for t in tiles:
        put_scores(t, t.weights, t.slopes)
        np.matmul(t.d, t.vt, out=t.dscores)
        if fill:
            fill(t.rows, t.keys, t.dropped)
        drop = (t.dropped, t.minus_dots) if fill else (None, None)
        passes.tile_backward(t.end, *t.seen, t.weights, t.dscores, *drop)
        if t.cap:
            np.multiply(t.dscores, t.slopes, out=t.dscores)
        if t.is_first:
            np.matmul(t.dropped.T, t.only_d, out=t.dv)
            np.matmul(t.dscores.T, t.only_q, out=t.dk)
        else:
            np.add(t.dv, np.matmul(t.dropped.T, t.only_d, out=t.part_k), out=t.dv)
            np.add(t.dk, np.matmul(t.dscores.T, t.only_q, out=t.part_k), out=t.dk)
        np.add(t.dq, np.matmul(t.dscores, t.k, out=t.part_q), out=t.dq)


def tiles_within(tiles, bounds):
    """Return the tiles of a sequence in which a query sees a key, without rows that see none.

    tiles    with fields `rows`, `keys` and `is_first`, and a method `within`
    bounds   of the sequence's queries, with starts
    """
    some, is_first = [], False
    for tile in tiles:
        seen = bounds.within(tile.rows).after(tile.keys.start)
        keys = seen.span(tile.keys.stop - tile.keys.start)
        is_first |= tile.is_first
        if keys.start < keys.stop:
            some.append(tile.within(seen, is_first))
            is_first = False
    return some
