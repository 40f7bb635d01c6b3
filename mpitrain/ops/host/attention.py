"""Causal attention on the host. memory.attention chooses saved exponentials or tiles. Incremental
decoding attends from new tokens to stored keys and values.

B batch, T tokens, C channels. `saved` is the state of the body that ran, and knows its backward.
`starts` is the first token of each token's document, (B, T), or None: a row is one document.
H heads, D = C / H; W tokens that a cache has room for; Q queries of a block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpitrain.ops.host import attention_tiled, attention_whole
from mpitrain.ops.host.blocks import rounds
from mpitrain.ops.random_bits import AttentionMask

# From this many tokens on, tiles are at least as fast as saved exponentials, in far less memory.
TILED_FROM = 512

QUERIES = 64
"""Queries per block: smaller blocks skip more of the masked half, but make slower products."""


def attention_backward(dy, saved, arena):
    return saved.backward(dy, arena)


def attention_next(qkv, keys, values, past, heads, arena):
    """Return y, and store the new keys and values.

    If each sequence has a single new token, all sequences are computed at once. Several new tokens
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
            sequence = slice(b, b + 1)
            _attend(
                q[sequence, :, rows],
                keys[sequence],
                values[sequence],
                [firsts[b] + start],
                out[sequence, :, rows],
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


class Forwards(NamedTuple):
    """The forward functions for one value of memory.attention, without and with dropout."""

    attention: Callable[..., Any]
    attention_dropout: Callable[..., Any]


def _forwards(attended: Callable[..., Any]) -> Forwards:
    """Return the forward functions of a body: (qkv, heads, masks or None, arena, starts) -> (y, saved)."""

    def attention(qkv, heads, arena, starts=None):
        return attended(qkv, heads, None, arena, starts)

    def attention_dropout(qkv, heads, key, step, first, every, rate, arena, starts=None):
        masks = AttentionMask(key, step, first, every, rate, qkv.shape[1])
        return attended(qkv, heads, masks, arena, starts)

    return Forwards(attention, attention_dropout)


def _by_length(qkv, *arguments):
    body = attention_tiled if qkv.shape[1] >= TILED_FROM else attention_whole
    return body.attended(qkv, *arguments)


FORWARDS = {
    "auto": _forwards(_by_length),
    "tiled": _forwards(attention_tiled.attended),
    "whole": _forwards(attention_whole.attended),
}
"""{value of memory.attention: its forward functions}"""

attention, attention_dropout = FORWARDS["auto"]
attention_dropout_backward = attention_backward
