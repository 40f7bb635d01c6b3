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
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mpitrain.ops.host import attention_tiled
from mpitrain.ops.host.product import SAFE, causal_mask, constant, rounds, split_heads
from mpitrain.ops.random_bits import AttentionMask
from mpitrain.ops.reference.attention import CAUSAL, Bounds, Seen

# From this many tokens on, tiles are at least as fast as saved exponentials, in far less memory.
TILED_FROM = 512
# Queries per block: smaller blocks skip more of the masked half, but make slower products.
QUERIES = 64


class QueryBlock(NamedTuple):
    """A block of queries: its `rows`, the exponentials of its scores, and 1 / their row sums.

    exp: (B, G, R, Q, K); inverse: (B, G, R, Q, 1)
    masked  number of the last keys that only some of the queries see
    """

    rows: slice
    masked: int
    exp: np.ndarray
    inverse: np.ndarray


class WholeState(NamedTuple):
    """The state for the backward: q (B, T, H D), kv (B, T, 2 G D), and every block of queries.

    drop    masks of dropout, or None
    seen    which keys the queries see
    bounds  of these keys
    passes  `PASSES`, or those in C++
    """

    q: np.ndarray
    kv: np.ndarray
    heads: int
    blocks: list[QueryBlock]
    drop: AttentionMask | None
    seen: Seen
    bounds: Bounds
    passes: Any

    def backward(self, dy, dq, dkv, arena):
        q, kv, heads, blocks, drop, visible, bounds, passes = self
        (batch, total, columns), length, dtype = q.shape, kv.shape[1], q.dtype
        width = columns // heads
        scale, groups = visible.scale_of(width), kv.shape[2] // (2 * width)
        each, last = heads // groups, min(total, QUERIES)
        flat_ds, flat_scaled = arena.take((2, heads * last * width), dtype)
        part = arena.take((groups, length, width), dtype)
        every_dot = arena.take((groups, each, last, 1), dtype)
        dscores = [arena.take(block.exp.shape[1:], dtype) for block in blocks]
        scratch = _scratch(blocks, arena) if drop else None
        queries, (keys_of, values_of) = split_heads(q, groups, each), split_heads(kv, 2, groups)
        every_dq, (every_dk, every_dv) = split_heads(dq, groups, each), split_heads(dkv, 2, groups)
        every_d = split_heads(dy, groups, each)
        seen = blocks[-1].exp.shape[4] if blocks else 0
        backwards = [*zip(reversed(blocks), reversed(dscores), strict=True)]
        for sequence in rounds(range(batch), q):
            own_q, d, own_dq = queries[:, sequence], every_d[:, sequence], every_dq[:, sequence]
            k, v = keys_of[sequence, :, None], values_of[sequence, :, None]
            dk, dv = every_dk[sequence], every_dv[sequence]
            if seen < length:
                dk[:, seen:] = dv[:, seen:] = 0
            for (rows, _, every_exp, every_inverse), dscore in backwards:
                exp, inverse = every_exp[sequence], every_inverse[sequence]
                keys, _ = bounds.keys_of(sequence, rows, stop=exp.shape[3])
                is_last, count = rows.stop == total, exp.shape[2]
                masks = _masks(drop, sequence, rows, exp, scratch) if drop else None
                exp, dscore = exp[..., keys], dscore[..., keys]
                masks = masks if masks is None else masks[..., keys]
                if is_last:
                    dk[:, : keys.start] = dv[:, : keys.start] = 0
                # Groups must be contiguous: the products for keys and values join their queries.
                size, shape = heads * count * width, (groups, each, count, width)
                ds, scaled = flat_ds[:size].reshape(shape), flat_scaled[:size].reshape(shape)
                dot = every_dot[:, :, :count]
                # dy takes the row sums and the scale, because it is (Q, D); exp and dscore are (Q, K).
                np.multiply(d[:, :, rows], inverse, out=ds)
                np.multiply(ds, scale, out=scaled)
                np.matmul(scaled, v[:, :, keys].swapaxes(2, 3), out=dscore)
                passes.scores_backward(exp, inverse, dscore, masks, dot)
                _write_or_add(exp if masks is None else masks, ds, dv[:, keys], is_last, part)
                np.matmul(dscore, k[:, :, keys], out=own_dq[:, :, rows])
                block_q = own_q[:, :, rows]
                if each > 1:
                    np.copyto(scaled, block_q)
                    block_q = scaled
                _write_or_add(dscore, block_q, dk[:, keys], is_last, part)


@np.errstate(over="ignore")  # The row sums show an overflow of an exponential.
def attended(q, kv, heads, drop, arena, visible=CAUSAL, passes=None):
    passes, bounds, offset = passes or PASSES, Bounds.of(visible, *q.shape[:2]), visible.offset
    (batch, count, columns), length, dtype = q.shape, kv.shape[1], q.dtype
    width = columns // heads
    scale, groups = visible.scale_of(width), kv.shape[2] // (2 * width)
    each = heads // groups
    y = arena.take(q.shape, dtype)
    blocks = []
    for start in range(0, count, QUERIES):
        stop = min(start + QUERIES, count)
        seen = min(stop + offset, length)
        exp = arena.take((batch, groups, each, stop - start, seen), dtype)
        inverse = arena.take((*exp.shape[:4], 1), dtype)
        masked = max(0, seen - start - offset)
        blocks.append(QueryBlock(slice(start, stop), masked, exp, inverse))
    last = min(count, QUERIES)
    mask = causal_mask(last, dtype)
    ones = constant(length, 1, dtype)
    every_scaled = arena.take((groups, each, last, width), dtype)
    scratch = _scratch(blocks, arena) if drop else None
    queries, (keys_of, values_of) = split_heads(q, groups, each), split_heads(kv, 2, groups)
    results = split_heads(y, groups, each)
    for sequence in rounds(range(batch), q):
        own_q, out = queries[:, sequence], results[:, sequence]
        k, v = keys_of[sequence, :, None], values_of[sequence, :, None]
        for rows, masked, every_exp, every_inverse in blocks:
            exp, inverse = every_exp[sequence], every_inverse[sequence]
            masks = _masks(drop, sequence, rows, exp, scratch) if drop else None
            keys, seen = bounds.keys_of(sequence, rows, stop=exp.shape[3])
            exp, masks = exp[..., keys], masks if masks is None else masks[..., keys]
            scaled = np.multiply(own_q[:, :, rows], scale, out=every_scaled[:, :, : exp.shape[2]])
            passes.exponentials(
                scaled,
                k[:, :, keys],
                mask,
                max(0, masked - every_exp.shape[4] + keys.stop),
                ones[keys],
                exp,
                inverse,
                seen,
            )
            if masks is not None:
                exp = np.multiply(exp, masks, out=masks)
            # The product goes into contiguous scratch, so that only one of the two writes is
            # strided.
            np.multiply(np.matmul(exp, v[:, :, keys], out=scaled), inverse, out=out[:, :, rows])
    return y, WholeState(q, kv, heads, blocks, drop, visible, bounds, passes)


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


def exponentials(q, k, mask, masked, ones, exp, inverse, seen):
    """Fill exp with the masked exponentials of q k^T, and inverse with 1 / its row sums.

    A softmax does not depend on a shift of its scores. NumPy takes twice as long for the row
    maximum as for the exponentials. So scores are shifted by their row maximum only where overflow
    or underflow requires it.

    q        (G, R, Q, D), scaled
    k        (G, 1, K, D)
    mask     (Q or more, Q or more), -inf above the diagonal, for the last `masked` keys
    ones     (K,)
    exp      (G, R, Q, K)
    inverse  (G, R, Q, 1)
    seen     the columns that each query sees, of those that the mask leaves
    """
    diagonal, mask = exp[..., exp.shape[3] - masked :], mask[: q.shape[2], :masked]
    np.matmul(q, k.swapaxes(2, 3), out=exp)
    diagonal += mask
    seen.hide_others(exp)
    np.exp(exp, out=exp)
    np.matmul(exp, ones, out=inverse[..., 0])
    # A method of the array would call these through a function in Python.
    least, most = np.minimum.reduce(inverse, None), np.maximum.reduce(inverse, None)
    if not (SAFE[0] < least and most < SAFE[1]):
        np.matmul(q, k.swapaxes(2, 3), out=exp)
        diagonal += mask
        seen.hide_others(exp)
        exp -= exp.max(axis=-1, keepdims=True)
        np.exp(exp, out=exp)
        np.matmul(exp, ones, out=inverse[..., 0])
    np.divide(1, inverse, out=inverse)


def scores_backward(exp, inverse, dscore, masks, dot):
    """Turn the gradient of the weights into that of the scores, in place.

    masks  of dropout, or None; becomes the weights after dropout
    exp, dscore, masks: (G, R, Q, K); inverse, dot: (G, R, Q, 1); dot is scratch
    """
    if masks is not None:
        dscore *= masks
        np.multiply(exp, masks, out=masks)
    np.vecdot(exp, dscore, out=dot[..., 0])
    dot *= inverse
    dscore -= dot
    dscore *= exp


PASSES = SimpleNamespace(exponentials=exponentials, scores_backward=scores_backward)


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


class Forwards(NamedTuple):
    """The forward functions for one value of memory.attention, without and with dropout."""

    attention: Callable[..., Any]
    attention_dropout: Callable[..., Any]
    attention_part: Callable[..., Any]


def forwards(attention: str, tiled: Any = None, whole: Any = None) -> Forwards:
    """Return the forward functions for a value of memory.attention.

    tiled, whole  the passes of the bodies; None: NumPy's
    """

    def attend(q, kv, heads, masks, arena, seen):
        is_long = attention == "auto" and kv.shape[1] >= TILED_FROM
        if attention == "tiled" or is_long or seen.cap:  # Saved exponentials have none.
            return attention_tiled.attended(q, kv, heads, masks, arena, seen, tiled)
        return attended(q, kv, heads, masks, arena, seen, whole)

    def attention_without(q, kv, heads, arena, seen=CAUSAL):
        return attend(q, kv, heads, None, arena, seen)

    def attention_dropout(q, kv, heads, key, step, first, every, rate, arena, seen=CAUSAL):
        masks = AttentionMask(key, step, first, every, rate, q.shape[1])
        return attend(q, kv, heads, masks, arena, seen)

    def attention_part(q, kv, heads, arena, seen=CAUSAL, earlier=None):
        y, state = attention_tiled.attended(q, kv, heads, None, arena, seen, tiled)
        if earlier is None:
            return y, state
        attention_tiled.join(earlier, state, arena)
        return earlier.y, earlier

    return Forwards(attention_without, attention_dropout, attention_part)


attention, attention_dropout, attention_part = forwards("auto")
attention_dropout_backward = attention_backward
