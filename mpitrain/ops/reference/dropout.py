"""The definition of dropout (Srivastava et al. 2014), and of its random bits (`random_bits`)."""

import numpy as np

from mpitrain.ops.random_bits import LANES, attention_number, scale, threshold
from mpitrain.ops.reference.layers import attended, attention_backward, into, plus

MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def dropout(x, key, step, first, columns, rate, arena, residual=None, out=None):
    """Return x mask / (1 - p) + residual; its backward is the same function of dy.

    The mask is 0 with probability p, the rate, and else 1. Element (m, c) has number first + m
    columns + c in the whole tensor.
    x: (M, C) of rows of `columns` elements; key: (seed, layer)
    """
    numbers = first + np.arange(len(x))[:, None] * columns + np.arange(x.shape[1])
    mask = random_bits(key, step, numbers) >= threshold(rate)
    return into(out, plus(x * mask * np.asarray(scale(rate), x.dtype), residual))


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


def random_bits(key, step, numbers):
    """Return the 16 bits of each element.    numbers: integers from 0, any shape"""
    words = np.empty((4, *numbers.shape), np.uint64)
    words[0], words[1], words[2:] = numbers // LANES + 1, step, 0
    keys = [int(word) for word in key]
    for _ in range(ROUNDS):
        high0, low0 = _product(MULTIPLIERS[0], words[0])
        high1, low1 = _product(MULTIPLIERS[1], words[2])
        words[:] = (
            high1 ^ words[1] ^ np.uint64(keys[0]),
            low1,
            high0 ^ words[3] ^ np.uint64(keys[1]),
            low0,
        )
        keys = [(word + add) % 2**64 for word, add in zip(keys, WEYL, strict=True)]
    lane = numbers % LANES
    word = np.take_along_axis(words, (lane // 4)[None], 0)[0]
    return word >> (lane % 4 * 16).astype(np.uint64) & np.uint64(0xFFFF)


def _product(factor, x):
    """Return the upper and the lower 64 bits of a product of 64-bit integers."""
    high, low = np.uint64(factor >> 32), np.uint64(factor & 0xFFFFFFFF)
    rest, above = x & LOW, x >> HALF
    middle = (low * rest >> HALF) + low * above
    carried = (middle & LOW) + high * rest
    return high * above + (middle >> HALF) + (carried >> HALF), np.uint64(factor) * x
