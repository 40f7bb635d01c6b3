"""Attention on the host. memory.attention chooses saved exponentials, here, or tiles. Incremental
decoding attends from new tokens to stored keys and values.

With saved exponentials, for short sequences, a block of queries of one sequence skips the keys that
none of them sees. Queries, keys and values are strided views that BLAS reads in place. `saved` takes
about B H T^2 / 2 elements with the causal mask, B H T^2 without.

B batch, T tokens. `saved` is the state of the body that ran, and knows its backward.
H query heads are G groups of R, D channels of a head; a group shares keys and values. W tokens that a
cache has room for. A block has Q queries; its last query sees K keys.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from mpitrain.ops.host import attention_tiled
from mpitrain.ops.host.bounds import Bounds
from mpitrain.ops.host.passes import NUMPY, by_numpy, hide_others
from mpitrain.ops.host.product import SAFE, rounds, split_heads
from mpitrain.ops.random_bits import AttentionMask
from mpitrain.ops.reference.attention import CAUSAL, Seen

# From this many tokens on, tiles are at least as fast as saved exponentials, in far less memory.
TILED_FROM = 512
# Queries per block: smaller blocks skip more of the masked half, but make slower products.
QUERIES = 64


class QueryBlock(NamedTuple):
    """A block of queries: its `rows`, the exponentials of its scores, and 1 / their row sums.

    exp: (B, G, R, Q, K); inverse: (B, G, R, Q, 1)
    """

    rows: slice
    exp: np.ndarray
    inverse: np.ndarray


class WholeState(NamedTuple):
    """The state for the backward, with every block of queries.

    q       view (G, B, R, T, D)
    kv      views (2, B, G, T, D)
    drop    masks of dropout, or None
    seen    which keys the queries see
    bounds  of these keys; None: there is the causal mask alone
    passes  `NUMPY` of passes.py, or those in C++
    """

    q: np.ndarray
    kv: np.ndarray
    blocks: list[QueryBlock]
    drop: AttentionMask | None
    seen: Seen
    bounds: Bounds | None
    passes: Any

    def parts(self, sequence, blocks, scratch):
        """Yield of each block of a sequence: its rows, the keys that some of these queries see, their
        bounds, the exponentials and 1 / row sums, and the masks of dropout in `scratch`, or None.
        """
        for rows, every_exp, inverse in blocks:
            exp, keys = every_exp[sequence], slice(0, every_exp.shape[4])
            seen: Any = (None, None)
            masks = _masks(self.drop, sequence, rows, exp, scratch) if self.drop else None
            if self.bounds:
                keys, seen = self.bounds.keys_of(sequence, rows, stop=keys.stop)
                exp, masks = exp[..., keys], masks if masks is None else masks[..., keys]
            yield rows, keys, seen, exp, inverse[sequence], masks

    def backward(self, dy, dq, dkv, arena):
        (groups, batch, each, total, width), length = self.q.shape, self.kv.shape[3]
        scale = self.seen.scale or width**-0.5
        rows_of_a_block = groups * each * min(total, QUERIES)
        scratch = arena.take((2, rows_of_a_block * width), dy.dtype)
        part = arena.take((groups, length, width), dy.dtype)
        dscores = [arena.take(block.exp.shape[1:], dy.dtype) for block in self.blocks]
        masked = _scratch(self.blocks, arena) if self.drop else None
        every_d, every_dq = split_heads(dy, groups, each), split_heads(dq, groups, each)
        every_dkv = split_heads(dkv, 2, groups)
        seen = self.blocks[-1].exp.shape[4] if self.blocks else 0
        for sequence in rounds(range(batch), dy):
            k, v = self.kv[:, sequence, :, None]
            dk, dv = every_dkv[:, sequence]
            dk[:, seen:] = dv[:, seen:] = 0
            parts = self.parts(sequence, reversed(self.blocks), masked)
            backwards = zip(parts, reversed(dscores), strict=True)
            for (rows, keys, _, exp, inverse, masks), dscore in backwards:
                dscore, is_last = dscore[..., keys], rows.stop == total
                if is_last:
                    dk[:, : keys.start] = dv[:, : keys.start] = 0
                # Groups must be contiguous: the products for keys and values join their queries.
                shape = *exp.shape[:3], width
                ds, scaled = scratch[:, : math.prod(shape)].reshape(2, *shape)
                # dy takes the row sums and the scale, because it is (Q, D); exp and dscore are (Q, K).
                np.multiply(every_d[:, sequence, :, rows], inverse, out=ds)
                np.multiply(ds, scale, out=scaled)
                np.matmul(scaled, v[:, :, keys].swapaxes(2, 3), out=dscore)
                self.passes.block_backward(exp, inverse, dscore, masks)
                _write_or_add(exp if masks is None else masks, ds, dv[:, keys], is_last, part)
                np.matmul(dscore, k[:, :, keys], out=every_dq[:, sequence, :, rows])
                q = self.q[:, sequence, :, rows]
                if each > 1:
                    np.copyto(scaled, q)
                    q = scaled
                _write_or_add(dscore, q, dk[:, keys], is_last, part)


@np.errstate(over="ignore", divide="ignore")  # The row sums show an overflow of an exponential.
def attended(q, kv, heads, drop, arena, seen=CAUSAL, passes_of=by_numpy):
    (batch, count, columns), length = q.shape, kv.shape[1]
    width = columns // heads
    groups = kv.shape[2] // (2 * width)
    each = heads // groups
    y, blocks = arena.take(q.shape, q.dtype), []
    for start in range(0, count, QUERIES):
        stop = min(start + QUERIES, count)
        shape = batch, groups, each, stop - start
        exp = arena.take((*shape, min(stop + seen.offset, length)), q.dtype)
        blocks.append(QueryBlock(slice(start, stop), exp, arena.take((*shape, 1), q.dtype)))
    scratch = _scratch(blocks, arena) if drop else None
    every_scaled = arena.take((groups, each, min(count, QUERIES), width), q.dtype)
    queries, out = split_heads(q, groups, each), split_heads(y, groups, each)
    every_kv, passes, scale = split_heads(kv, 2, groups), passes_of(y), seen.scale or width**-0.5
    bounds = Bounds.of(seen, batch, count) if seen.window or seen.starts is not None else None
    state = WholeState(queries, every_kv, blocks, drop, seen, bounds, passes)
    for sequence in rounds(range(batch), q):
        k, v = every_kv[:, sequence, :, None]
        parts = state.parts(sequence, blocks, scratch)
        for rows, keys, (starts, ends), exp, inverse, masks in parts:
            scaled, own_k = every_scaled[:, :, : exp.shape[2]], k[:, :, keys].swapaxes(2, 3)
            np.multiply(queries[:, sequence, :, rows], scale, out=scaled)
            np.matmul(scaled, own_k, out=exp)
            end = rows.start + seen.offset + 1 - keys.start
            if not passes.weigh_block(end, *SAFE, starts, ends, exp, inverse):
                np.matmul(scaled, own_k, out=exp)
                _weigh_shifted(end, starts, ends, exp, inverse)
            if masks is not None:
                exp = np.multiply(exp, masks, out=masks)
            # The product goes into contiguous scratch, so that only one of the two writes is strided.
            np.matmul(exp, v[:, :, keys], out=scaled)
            np.multiply(scaled, inverse, out=out[:, sequence, :, rows])
    return y, state


def _weigh_shifted(end, starts, ends, exp, inverse):
    """Replace scores by exponentials of which the largest of a row is 1, and write 1 / row sum.

    A softmax does not depend on a shift of its scores. NumPy takes twice as long for the row maximum
    as for the exponentials. So scores are shifted only where overflow or underflow requires it.
    """
    hide_others(end, starts, ends, exp)
    exp -= exp.max(axis=-1, keepdims=True)
    NUMPY.weigh_block(end, *SAFE, starts, ends, exp, inverse)


def _scratch(blocks, arena):
    """Lease the masks of the largest block of one sequence, flat."""
    like = max((block.exp for block in blocks), key=lambda exp: exp.size)
    return arena.take((math.prod(like.shape[1:]),), like.dtype)


def _masks(drop, sequence, rows, exp, scratch):
    """Return the masks of a block, in scratch.    exp: (G, R, Q, K), as the result"""
    masks = scratch[: exp.size].reshape(-1, *exp.shape[2:])
    for head in rounds(range(len(masks)), masks):
        drop.fill(sequence, head, rows, slice(0, exp.shape[3]), masks[head])
    return masks.reshape(exp.shape)


def _write_or_add(a, b, out, first, part):
    """Write the sum of a^T b over the heads of each group to out if `first`, or add it.

    The last block of queries sees every key and writes. The blocks before it add to the keys that
    they see.
    a: (G, R, Q, K); b: (G, R, Q, D); out: (G, K, D); part: scratch (G, T, D)
    """
    a = a.reshape(len(a), -1, a.shape[3]).swapaxes(1, 2)
    b = b.reshape(len(b), -1, b.shape[3])
    if first:
        np.matmul(a, b, out=out)
    else:
        out += np.matmul(a, b, out=part[:, : out.shape[1]])


def attention_backward(dy, saved, dq, dkv, arena):
    saved.backward(dy, dq, dkv, arena)


def attention_part_backward(dy, saved, q, kv, dq, dkv, arena, seen=CAUSAL):
    saved.of_part(q, kv, seen).backward(dy, dq, dkv, arena)


def attention_next(q, kv, keys, values, past, heads, arena, seen=CAUSAL):
    """Return y, and store the new keys and values.

    If each sequence has a single new token, all sequences are computed at once. Several new tokens
    are computed sequence by sequence, in blocks of queries.

    q, y: (B, T, H D); kv: (B, T, 2 G D); keys, values: (B, G, W, D); past: (B,)
    """
    (batch, length, _), groups = q.shape, keys.shape[1]
    y = arena.take(q.shape, q.dtype)
    firsts = past.tolist()
    if not y.size:
        return y
    k, v = split_heads(kv, 2, groups)
    queries, out = (split_heads(x, groups, heads // groups).swapaxes(0, 1) for x in (q, y))
    for b, first in enumerate(firsts):
        keys[b, :, first : first + length] = k[b]
        values[b, :, first : first + length] = v[b]
    if length == 1:
        _attend(queries, keys, values, firsts, out, arena, seen)
        return y
    for b in rounds(range(batch), q):
        for start in range(0, length, QUERIES):
            rows = slice(start, min(start + QUERIES, length))
            sequence = slice(b, b + 1)
            _attend(
                queries[sequence, :, :, rows],
                keys[sequence],
                values[sequence],
                [firsts[b] + start],
                out[sequence, :, :, rows],
                arena,
                seen,
            )
    return y


def _attend(q, keys, values, firsts, out, arena, visible):
    """Fill out with the attention of some queries of each sequence.

    firsts      position of the first query, for each sequence
    q, out      (B, G, R, Q, D)
    keys, values  (B, G, W, D), of which those that a query sees are each read once
    """
    (batch, groups, each, count, width), window = q.shape, visible.window
    end = max(firsts) + count
    seen = np.arange(max(0, min(firsts) + 1 - window) if window else 0, end)
    some = slice(end - len(seen), end)
    exp = arena.take((q.size // width * keys.shape[2],), q.dtype)
    exp = exp[: q.size // width * len(seen)].reshape(batch, groups, each * count, len(seen))
    scaled = (q * visible.scale_of(width)).reshape(batch, groups, each * count, width)
    np.matmul(scaled, keys[:, :, some].swapaxes(2, 3), out=exp)
    if visible.cap:
        attention_tiled.put_capped(exp, visible.cap)
    if count > 1 or min(firsts) < max(firsts):
        lasts = np.tile(np.add.outer(firsts, np.arange(count)), each)[:, None, :, None]
        np.copyto(exp, -np.inf, where=seen > lasts)
        if window:
            np.copyto(exp, -np.inf, where=seen <= lasts - window)
    exp -= np.maximum.reduce(exp, -1, keepdims=True)
    np.exp(exp, out=exp)
    sums = np.add.reduce(exp, -1, keepdims=True)
    total = np.matmul(exp, values[:, :, some])
    np.divide(total.reshape(q.shape), sums.reshape(*q.shape[:4], 1), out=out)


def attention(passes_of, kind, q, kv, heads, arena, seen=CAUSAL):
    return _body(kind, kv, seen)(q, kv, heads, None, arena, seen, passes_of)


def attention_dropout(
    passes_of, kind, q, kv, heads, key, step, first, every, rate, arena, seen=CAUSAL
):
    drop = AttentionMask(key, step, first, every, rate, q.shape[1])
    return _body(kind, kv, seen)(q, kv, heads, drop, arena, seen, passes_of)


def _body(kind, kv, seen):
    """Return the function that computes such an attention.    kind: as memory.attention"""
    is_long = kind == "auto" and kv.shape[1] >= TILED_FROM
    is_tiled = kind == "tiled" or is_long or seen.cap  # Saved exponentials have no soft-cap.
    return attention_tiled.attended if is_tiled else attended


def attention_part(passes_of, kind, q, kv, heads, arena, seen=CAUSAL, earlier=None):
    # In tiles for each kind: whole exponentials of parts could not be joined.
    y, state = attention_tiled.attended(q, kv, heads, None, arena, seen, passes_of)
    if earlier is None:
        return y, state
    attention_tiled.join(earlier, state, arena)
    return earlier.y, earlier


attention_dropout_backward = attention_backward
WITH_PASSES = attention, attention_dropout, attention_part
"""The operations that take `passes_of` (passes.py) and memory.attention first."""
