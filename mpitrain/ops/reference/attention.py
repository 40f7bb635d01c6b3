"""The definition of causal attention, with and without dropout, and of its incremental form."""

import numpy as np

from mpitrain.ops.random_bits import attention_number, scale, threshold
from mpitrain.ops.reference.layers import random_bits


def attention(qkv, heads, arena, starts=None):
    """Return (y, saved) with y = softmax(q k^T / sqrt(D), causal) v for each head (Vaswani et al.
    2017).

    A query sees the keys from its document's first token on.

    qkv     (B, T, 3C): queries, keys and values side by side, each with its heads side by side
    starts  (B, T) int32: of each token, the first token of its document; ascending in a row, none
            after its token. None: a row is one document
    y       (B, T, C)
    """
    return attended(qkv, heads, 1, starts)


def attended(qkv, heads, mask, starts=None):
    """Return (y, saved) of attention whose probabilities are multiplied by a mask, (B, H, T, T)."""
    q, k, v = _heads(qkv, heads)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1], dtype=qkv.dtype)
    is_seen = np.tri(qkv.shape[1], dtype=bool)
    if starts is not None:
        is_seen = is_seen & (np.arange(qkv.shape[1]) >= starts[:, None, :, None])
    scores = np.where(is_seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    y = (weights * mask @ v).swapaxes(1, 2).reshape(*qkv.shape[:2], qkv.shape[2] // 3)
    return y, (qkv, weights, mask)


def attention_next(qkv, keys, values, past, heads, arena):
    """Return y of `attention` for new tokens that follow stored ones (incremental decoding).

    New token t of sequence b has the position past[b] + t. Its key and value are stored there, and
    it sees all positions up to its own.

    qkv           (B, T, 3C), of the new tokens
    keys, values  (B, H, W, D), finite; they receive the new keys and values
    past          (B,) int64, with past + T <= W
    y             (B, T, C)
    """
    every_q, every_k, every_v = _heads(qkv, heads)
    y = np.empty_like(every_q)
    for b, first in enumerate(past):
        for t, q in enumerate(every_q[b].swapaxes(0, 1)):
            end = first + t + 1
            keys[b, :, end - 1], values[b, :, end - 1] = every_k[b, :, t], every_v[b, :, t]
            scores = (keys[b, :, :end] @ q[..., None])[..., 0]
            scores /= np.sqrt(q.shape[-1], dtype=qkv.dtype)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            y[b, :, t] = (weights[:, None] @ values[b, :, :end])[:, 0]
    return y.swapaxes(1, 2).reshape(*qkv.shape[:2], qkv.shape[2] // 3)


def attention_backward(dy, saved, arena):
    """Return dqkv.    dy: (B, T, C); dqkv: (B, T, 3C)"""
    qkv, weights, mask = saved
    heads = weights.shape[1]
    q, k, v = _heads(qkv, heads)
    d = dy.reshape(*dy.shape[:2], heads, v.shape[-1]).swapaxes(1, 2)
    dweights = d @ v.swapaxes(-1, -2) * mask
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True))
    dscores /= np.sqrt(q.shape[-1], dtype=qkv.dtype)
    dqkv = np.empty_like(qkv)
    dq, dk, dv = _heads(dqkv, heads)
    dq[...] = dscores @ k
    dk[...] = dscores.swapaxes(-1, -2) @ q
    dv[...] = (weights * mask).swapaxes(-1, -2) @ d
    return dqkv


def attention_dropout(qkv, heads, key, step, first, every, rate, arena, starts=None):
    """Return (y, saved) of causal attention with dropout of its probabilities.

    Head h of sequence b has the number first + b every + h. `attention_number` numbers the
    probabilities of a head.
    qkv: (B, T, 3C); y: (B, T, C); key: (seed, layer)
    """
    batch, length, _ = qkv.shape
    number = (first + np.arange(batch)[:, None] * every + np.arange(heads))[..., None, None]
    queries, keys = np.arange(length)[:, None], np.arange(length)
    bits = random_bits(key, step, attention_number(number, queries, keys, length))
    mask = (bits >= threshold(rate)) * np.asarray(scale(rate), qkv.dtype)
    return attended(qkv, heads, mask, starts)


attention_dropout_backward = attention_backward


def _heads(packed, heads):
    """Return views of q, k, v, each (B, H, T, D), into (B, T, 3C)."""
    batch, length, width = packed.shape
    return packed.reshape(batch, length, 3, heads, width // 3 // heads).transpose(2, 0, 3, 1, 4)
