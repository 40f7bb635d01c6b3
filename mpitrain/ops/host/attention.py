"""Causal attention, one sequence at a time, the queries in blocks that skip the keys after them.

B batch, T tokens, C channels, H heads, D = C / H. Queries, keys and values are strided views of (B, T, 3C) that BLAS
reads in place. `saved` holds qkv and, for each block of queries, exp(score - row maximum) (B, H, queries, keys) and 1 /
its row sums: about B H T^2 / 2 elements.
"""

import numpy as np

QUERIES = 128  # per block; smaller blocks skip more of the masked half but make slower products


def attention(qkv, heads, arena):
    batch, length, packed = qkv.shape
    width = packed // 3 // heads
    y = arena.take((batch, length, packed // 3), qkv.dtype)
    blocks = [
        (rows, arena.take((batch, heads, rows.stop - rows.start, rows.stop), qkv.dtype),
         arena.take((batch, heads, rows.stop - rows.start, 1), qkv.dtype))
        for rows in _query_blocks(length)
    ]
    mask = np.triu(np.full((QUERIES, QUERIES), -np.inf, qkv.dtype), 1)
    scaled = arena.take((heads, min(length, QUERIES), width), qkv.dtype)
    for sequence in range(batch):
        q, k, v = _heads(qkv[sequence], 3, heads)
        out, = _heads(y[sequence], 1, heads)
        for rows, every_exp, every_inverse in blocks:
            exp, inverse = every_exp[sequence], every_inverse[sequence]
            count = rows.stop - rows.start
            np.multiply(q[:, rows], width**-0.5, out=scaled[:, :count])
            np.matmul(scaled[:, :count], k[:, :rows.stop].swapaxes(1, 2), out=exp)
            exp[:, :, rows] += mask[:count, :count]
            np.max(exp, axis=-1, keepdims=True, out=inverse)
            exp -= inverse
            np.exp(exp, out=exp)
            np.sum(exp, axis=-1, keepdims=True, out=inverse)
            np.divide(1, inverse, out=inverse)
            np.matmul(exp, v[:, :rows.stop], out=out[:, rows])
            out[:, rows] *= inverse
    return y, (qkv, heads, blocks)


def attention_backward(dy, saved, arena):
    qkv, heads, blocks = saved
    batch, length, channels = dy.shape
    width = channels // heads
    dqkv = arena.take(qkv.shape, qkv.dtype)
    last = min(length, QUERIES)
    scaled = arena.take((heads, last, width), qkv.dtype)
    part = arena.take((heads, length, width), qkv.dtype)
    dot = arena.take((heads, last, 1), qkv.dtype)
    for sequence in range(batch):
        q, k, v = _heads(qkv[sequence], 3, heads)
        dq, dk, dv = _heads(dqkv[sequence], 3, heads)
        d, = _heads(dy[sequence], 1, heads)
        for rows, every_exp, every_inverse in reversed(blocks):
            exp, inverse = every_exp[sequence], every_inverse[sequence]
            keys, count = rows.stop, rows.stop - rows.start
            # Dividing dy by the row sums once spares dividing exp, which is larger.
            ds = np.multiply(d[:, rows], inverse, out=scaled[:, :count])
            _write_or_add(exp.swapaxes(1, 2), ds, dv[:, :keys], keys == length, part)
            dscore = arena.take(exp.shape, exp.dtype)
            np.matmul(ds, v[:, :keys].swapaxes(1, 2), out=dscore)
            weighted = np.einsum("hqk,hqk->hq", exp, dscore, out=dot[:, :count, 0])[..., None]
            weighted *= inverse
            dscore -= weighted
            dscore *= exp
            np.matmul(dscore, k[:, :keys], out=dq[:, rows])
            dq[:, rows] *= width**-0.5
            np.multiply(q[:, rows], width**-0.5, out=ds)
            _write_or_add(dscore.swapaxes(1, 2), ds, dk[:, :keys], keys == length, part)
    return dqkv


def _write_or_add(a, b, out, first, part):
    """The last block of queries sees every key and writes; the blocks before it add to the keys they see."""
    if first:
        np.matmul(a, b, out=out)
    else:
        out += np.matmul(a, b, out=part[:, :out.shape[1]])


def _query_blocks(length):
    return [slice(start, min(start + QUERIES, length)) for start in range(0, length, QUERIES)]


def _heads(packed, parts, heads):
    """`parts` views (H, T, D) into (T, parts C)."""
    return packed.reshape(len(packed), parts, heads, -1).transpose(1, 2, 0, 3)
