"""Attention of new tokens over the stored keys and values of earlier ones (incremental decoding).

B batch, T new tokens, C channels, H heads, D = C / H; W tokens that a cache has room for; Q queries
of a block, K keys that its last query sees.
"""

import numpy as np

from mpitrain.ops.host.blocks import rounds

QUERIES = 64
"""Queries per block: smaller blocks skip more of the masked half, but make slower products."""


def attention_next(qkv, keys, values, past, heads, arena):
    """Return y, and store the new keys and values.

    A single new token of each sequence is computed for all sequences at once; several new tokens
    are computed sequence by sequence, in blocks of queries.

    qkv: (B, T, 3C); keys, values: (B, H, W, D); past: (B,); y: (B, T, C)
    """
    batch, length, packed = qkv.shape
    y = arena.take((batch, length, packed // 3), qkv.dtype)
    firsts = past.tolist()
    if not y.size:
        return y
    q, k, v = qkv.reshape(batch, length, 3, heads, -1).transpose(2, 0, 3, 1, 4)
    out = y.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
    for b, first in enumerate(firsts):
        keys[b, :, first : first + length] = k[b]
        values[b, :, first : first + length] = v[b]
    if length == 1:
        _attend(q, keys, values, firsts, out, arena)
        return y
    for b in rounds(batch, qkv):
        for start in range(0, length, QUERIES):
            rows = slice(start, min(start + QUERIES, length))
            one = slice(b, b + 1)
            _attend(
                q[one, :, rows],
                keys[one],
                values[one],
                [firsts[b] + start],
                out[one, :, rows],
                arena,
            )
    return y


def _attend(q, keys, values, firsts, out, arena):
    """Fill out with the attention of some queries of each sequence.

    firsts      position of the first query, for each sequence
    q, out      (B, H, Q, D)
    keys, values  (B, H, W, D)
    """
    batch, heads, count, width = q.shape
    seen = max(firsts) + count
    exp = arena.take((batch * heads * count * keys.shape[2],), q.dtype)
    exp = exp[: batch * heads * count * seen].reshape(batch, heads, count, seen)
    np.matmul(q * width**-0.5, keys[:, :, :seen].swapaxes(2, 3), out=exp)
    if count > 1 or min(firsts) < max(firsts):
        ends = np.add.outer(firsts, np.arange(count))[:, None, :, None]
        np.copyto(exp, -np.inf, where=np.arange(seen) > ends)
    exp -= np.maximum.reduce(exp, -1, keepdims=True)
    np.exp(exp, out=exp)
    sums = np.add.reduce(exp, -1, keepdims=True)
    np.divide(np.matmul(exp, values[:, :, :seen]), sums, out=out)
