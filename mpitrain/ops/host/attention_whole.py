"""Causal attention with saved exponentials, for short sequences.

A block of queries of one sequence skips the keys after it. B batch, T tokens, C channels, H heads,
D = C / H. A block has Q queries; its last query sees K keys. Queries, keys and values are
strided views of (B, T, 3C) that BLAS reads in place. `saved` takes about B H T^2 / 2 elements.
With documents a block skips the keys before the document of its first query.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpitrain.ops.host.blocks import constant, rounds
from mpitrain.ops.random_bits import AttentionMask

# Queries per block: smaller blocks skip more of the masked half, but make slower products.
QUERIES = 64
# Row sums within these bounds have lost nothing to overflow or underflow, in float32 or float64.
SAFE = (1e-25, 1e25)


class QueryBlock(NamedTuple):
    """A block of queries: its `rows`, the exponentials of its scores, and 1 / their row sums.

    exp: (B, H, Q, K); inverse: (B, H, Q, 1)
    """

    rows: slice
    exp: np.ndarray
    inverse: np.ndarray


class WholeState(NamedTuple):
    """The state for the backward: the packed input (B, T, 3C), and every block of queries.

    drop    masks of dropout, or None
    starts  (B, T) first token of each token's document, or None
    """

    qkv: np.ndarray
    heads: int
    blocks: list[QueryBlock]
    drop: AttentionMask | None
    starts: np.ndarray | None

    def backward(self, dy, arena):
        return _backward(dy, self, arena)


@np.errstate(over="ignore")  # The row sums show an overflow of an exponential.
def attended(qkv, heads, drop, arena, starts=None):
    batch, length, packed = qkv.shape
    width = packed // 3 // heads
    y = arena.take((batch, length, packed // 3), qkv.dtype)
    blocks = []
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        exp = arena.take((batch, heads, stop - start, stop), qkv.dtype)
        blocks.append(
            QueryBlock(slice(start, stop), exp, arena.take((*exp.shape[:3], 1), qkv.dtype))
        )
    last = min(length, QUERIES)
    mask = causal_mask(last, qkv.dtype)
    ones = constant(length, 1, qkv.dtype)
    every_scaled = arena.take((heads, last, width), qkv.dtype)
    scratch = _scratch(blocks, arena) if drop else None
    every_q, every_k, every_v = split_heads(qkv, 3, heads)
    (every_out,) = split_heads(y, 1, heads)
    for sequence in rounds(batch, qkv):
        q, k, v, out = every_q[sequence], every_k[sequence], every_v[sequence], every_out[sequence]
        for rows, every_exp, every_inverse in blocks:
            exp, inverse = every_exp[sequence], every_inverse[sequence]
            masks = _masks(drop, sequence, rows, exp, scratch) if drop else None
            keys, firsts = slice(0, rows.stop), None
            if starts is not None:
                keys, firsts, exp, masks = _within(starts[sequence, rows], rows, exp, masks)
            scaled = np.multiply(q[:, rows], width**-0.5, out=every_scaled[:, : exp.shape[1]])
            _exponentials(scaled, k[:, keys], mask, ones[keys], exp, inverse, firsts)
            if masks is not None:
                exp = np.multiply(exp, masks, out=masks)
            # The product goes into contiguous scratch, so that only one of the two writes is
            # strided.
            np.multiply(np.matmul(exp, v[:, keys], out=scaled), inverse, out=out[:, rows])
    return y, WholeState(qkv, heads, blocks, drop, starts)


def _within(starts, rows, *arrays):
    """Return the keys from the document of a block's first query on, and the arrays of these keys.

    starts   (Q,), of the queries `rows`
    arrays   (H, Q, K) or None
    returns  keys, the first visible of these for each query (Q,), then the arrays (H, Q, fewer)
    """
    first = int(starts[0])
    cut = (None if one is None else one[..., first:] for one in arrays)
    return slice(first, rows.stop), starts - first, *cut


def _scratch(blocks, arena):
    """Lease the masks of the largest block of one sequence, flat."""
    like = max((block.exp for block in blocks), key=lambda exp: exp.size)
    return arena.take((math.prod(like.shape[1:]),), like.dtype)


def _masks(drop, sequence, rows, exp, scratch):
    """Return the masks of a block, in scratch.    exp: (H, Q, K), as the result"""
    masks = scratch[: exp.size].reshape(exp.shape)
    for head in rounds(len(masks), masks):
        drop.fill(sequence, head, rows, slice(0, rows.stop), masks[head])
    return masks


def _backward(dy, saved, arena):
    qkv, heads, blocks, drop, starts = saved
    batch, length, channels = dy.shape
    width = channels // heads
    dqkv = arena.take(qkv.shape, qkv.dtype)
    last = min(length, QUERIES)
    every_ds, every_scaled = arena.take((2, heads, last, width), qkv.dtype)
    part = arena.take((heads, length, width), qkv.dtype)
    every_dot = arena.take((heads, last, 1), qkv.dtype)
    dscores = [arena.take(block.exp.shape[1:], qkv.dtype) for block in blocks]
    scratch = _scratch(blocks, arena) if drop else None
    every_q, every_k, every_v = split_heads(qkv, 3, heads)
    every_dq, every_dk, every_dv = split_heads(dqkv, 3, heads)
    (every_d,) = split_heads(dy, 1, heads)
    backwards = [*zip(reversed(blocks), reversed(dscores), strict=True)]
    for sequence in rounds(batch, qkv):
        q, k, v, d = every_q[sequence], every_k[sequence], every_v[sequence], every_d[sequence]
        dq, dk, dv = every_dq[sequence], every_dk[sequence], every_dv[sequence]
        for (rows, every_exp, every_inverse), dscore in backwards:
            exp, inverse = every_exp[sequence], every_inverse[sequence]
            keys, is_last, count = slice(0, rows.stop), rows.stop == length, exp.shape[1]
            masks = _masks(drop, sequence, rows, exp, scratch) if drop else None
            if starts is not None:
                keys, _, exp, dscore, masks = _within(
                    starts[sequence, rows], rows, exp, dscore, masks
                )
                if is_last:
                    dk[:, : keys.start] = dv[:, : keys.start] = 0
            ds, scaled, dot = every_ds[:, :count], every_scaled[:, :count], every_dot[:, :count]
            # dy takes the row sums and the scale, because it is (Q, D); exp and dscore are (Q, K).
            np.multiply(d[:, rows], inverse, out=ds)
            np.multiply(ds, width**-0.5, out=scaled)
            np.matmul(scaled, v[:, keys].swapaxes(1, 2), out=dscore)
            weights = exp
            if masks is not None:
                dscore *= masks
                weights = np.multiply(exp, masks, out=masks)
            _write_or_add(weights.swapaxes(1, 2), ds, dv[:, keys], is_last, part)
            np.vecdot(exp, dscore, out=dot[..., 0])
            dot *= inverse
            dscore -= dot
            dscore *= exp
            np.matmul(dscore, k[:, keys], out=dq[:, rows])
            _write_or_add(dscore.swapaxes(1, 2), q[:, rows], dk[:, keys], is_last, part)
    return dqkv


def _exponentials(q, k, mask, ones, exp, inverse, firsts):
    """Fill exp with the masked exponentials of q k^T, and inverse with 1 / its row sums.

    A softmax does not depend on a shift of its scores. NumPy takes twice as long for the row
    maximum as for the exponentials. So scores are shifted by their row maximum only where overflow
    or underflow requires it.

    q        (H, Q, D), scaled
    k        (H, K, D)
    mask     (Q or more, Q or more), -inf above the diagonal, for the last Q keys
    ones     (K,)
    exp      (H, Q, K)
    inverse  (H, Q, 1)
    firsts   (Q,) the first visible key of each query, or None: it sees all keys
    """
    count = q.shape[1]
    diagonal, mask = exp[..., -count:], mask[:count, :count]
    np.matmul(q, k.swapaxes(1, 2), out=exp)
    diagonal += mask
    if firsts is not None:
        hide(exp, firsts)
    np.exp(exp, out=exp)
    np.matmul(exp, ones, out=inverse[..., 0])
    # A method of the array would call these through a function in Python.
    least, most = np.minimum.reduce(inverse, None), np.maximum.reduce(inverse, None)
    if not (SAFE[0] < least and most < SAFE[1]):
        np.matmul(q, k.swapaxes(1, 2), out=exp)
        diagonal += mask
        if firsts is not None:
            hide(exp, firsts)
        exp -= exp.max(axis=-1, keepdims=True)
        np.exp(exp, out=exp)
        np.matmul(exp, ones, out=inverse[..., 0])
    np.divide(1, inverse, out=inverse)


def _write_or_add(a, b, out, first, part):
    """Write a b to out if `first`, or add it.

    The last block of queries sees every key and writes. The blocks before it add to the keys that
    they see.
    a: (H, K, Q); b: (H, Q, D); out: (H, K, D); part: scratch (H, T, D)
    """
    if first:
        np.matmul(a, b, out=out)
    else:
        out += np.matmul(a, b, out=part[:, : out.shape[1]])


@lru_cache(64)
def causal_mask(count, dtype):
    """Return -inf for the keys after each query, else 0.    returns (count, count), read-only"""
    mask = np.triu(np.full((count, count), -np.inf, dtype), 1)
    mask.flags.writeable = False
    return mask


def hide(scores, firsts):
    """Set the scores of keys before the first visible key of each query to -inf, in place.

    scores  (..., Q, K)
    firsts  (Q,), ascending: the column of the first visible key; 0 or less: all are visible
    """
    if firsts[-1] > 0:
        np.copyto(scores, -np.inf, where=np.arange(scores.shape[-1]) < firsts[:, None])


def split_heads(packed, parts, heads):
    """Return `parts` views (B, H, T, D) into (B, T, parts C)."""
    batch, length, channels = packed.shape
    width = channels // (parts * heads)
    return packed.reshape(batch, length, parts, heads, width).transpose(2, 0, 3, 1, 4)
