"""Attention on the host. memory.attention chooses saved exponentials or tiles. Incremental
decoding attends from new tokens to stored keys and values.

B batch, T tokens. `saved` is the state of the body that ran, and knows its backward.
H query heads are G groups of R, D channels of a head; W tokens that a cache has room for; Q queries of
a block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpitrain.ops.host import attention_tiled, attention_whole
from mpitrain.ops.host.attention_whole import split_heads
from mpitrain.ops.host.blocks import rounds
from mpitrain.ops.random_bits import AttentionMask
from mpitrain.ops.seen import CAUSAL

# From this many tokens on, tiles are at least as fast as saved exponentials, in far less memory.
TILED_FROM = 512

QUERIES = 64
"""Queries per block: smaller blocks skip more of the masked half, but make slower products."""


def attention_backward(dy, saved, dq, dkv, arena):
    saved.backward(dy, dq, dkv, arena)


def attention_part_backward(dy, saved, q, kv, dq, dkv, arena, seen=CAUSAL):
    saved.of_part(q, kv, seen).backward(dy, dq, dkv, arena)


def attention_next(q, kv, keys, values, past, heads, arena, window=0):
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
        _attend(queries, keys, values, firsts, out, arena, window)
        return y
    for b in rounds(batch, q):
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
                window,
            )
    return y


def _attend(q, keys, values, firsts, out, arena, window):
    """Fill out with the attention of some queries of each sequence.

    firsts      position of the first query, for each sequence
    q, out      (B, G, R, Q, D)
    keys, values  (B, G, W, D), of which those that a query sees are each read once
    """
    batch, groups, each, count, width = q.shape
    end = max(firsts) + count
    seen = np.arange(max(0, min(firsts) + 1 - window) if window else 0, end)
    some = slice(end - len(seen), end)
    exp = arena.take((q.size // width * keys.shape[2],), q.dtype)
    exp = exp[: q.size // width * len(seen)].reshape(batch, groups, each * count, len(seen))
    scaled = (q * width**-0.5).reshape(batch, groups, each * count, width)
    np.matmul(scaled, keys[:, :, some].swapaxes(2, 3), out=exp)
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

    def attended(q, kv, heads, masks, arena, seen):
        is_tiled = attention == "tiled" or (attention == "auto" and kv.shape[1] >= TILED_FROM)
        body, passes = (attention_tiled, tiled) if is_tiled else (attention_whole, whole)
        return body.attended(q, kv, heads, masks, arena, seen, passes)

    def attention_without(q, kv, heads, arena, seen=CAUSAL):
        return attended(q, kv, heads, None, arena, seen)

    def attention_dropout(q, kv, heads, key, step, first, every, rate, arena, seen=CAUSAL):
        masks = AttentionMask(key, step, first, every, rate, q.shape[1])
        return attended(q, kv, heads, masks, arena, seen)

    def attention_part(q, kv, heads, arena, seen=CAUSAL, earlier=None):
        y, state = attention_tiled.attended(q, kv, heads, None, arena, seen, tiled)
        if earlier is None:
            return y, state
        attention_tiled.join(earlier, state, arena)
        return earlier.y, earlier

    return Forwards(attention_without, attention_dropout, attention_part)


attention, attention_dropout, attention_part = forwards("auto")
attention_dropout_backward = attention_backward
