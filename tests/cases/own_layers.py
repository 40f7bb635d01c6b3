"""Layers as a user writes them: dropout, which draws random numbers, and attention with grouped heads."""

import zlib

import numpy as np

from mpitrain.layers.base import Unit, normal
from mpitrain.layers.plain import Sequential


class Dropout:
    """Zeros with probability 1/4, by (seed, step, row, unit, channel); the rest grows by 4/3. Not in evaluations."""

    output_is_free = True

    def __init__(self, layers, unit):
        self.layers, self.unit = layers, zlib.crc32(unit.encode())

    def parameters(self):
        return []

    def output_shape(self, shape):
        return shape

    def _thinned(self, x, now, arena):
        y = arena.take(x.shape, x.dtype)
        bits = [
            np.random.default_rng([5, now.step, row, self.unit]).random(x.shape[-1])
            for row in self.layers.row_numbers(x.shape, now)
        ]
        np.multiply(x, np.reshape(bits, x.shape) > 0.25, out=y)
        y *= 4 / 3
        return y

    def forward(self, w, x, now, arena):
        if now.trains:
            return self._thinned(x, now, arena), now
        y = arena.take(x.shape, x.dtype)
        y[...] = x
        return y, None

    def backward_input(self, w, dy, saved, arena):
        return self._thinned(dy, saved, arena), None

    def backward_weight(self, pending, dw, arena):
        pass


class GroupedAttention:
    """Causal attention in which groups of heads share keys and values, by repeating these.

    (B, T, (H + 2 K) D) -> (B, T, H D): H heads and K key and value heads of D channels
    """

    output_is_free = False

    def __init__(self, layers, width, heads, kv_heads):
        self.inner, n = layers.attention(width, heads), layers.rows.ranks
        self.each = width // heads
        self.heads, self.kv_heads = heads // n, kv_heads // n

    def parameters(self):
        return []

    def output_shape(self, shape):
        return (*shape[:-1], self.heads * self.each)

    def _cut(self, x):
        """Views of queries, keys and values, each (B, T, heads, D)."""
        x = x.reshape(*x.shape[:-1], -1, self.each)
        return np.split(x, [self.heads, self.heads + self.kv_heads], axis=-2)

    def forward(self, w, x, now, arena):
        q, k, v = self._cut(x)
        more = self.heads // self.kv_heads
        whole = np.concatenate([q, k.repeat(more, 2), v.repeat(more, 2)], 2)
        return self.inner.forward(w, whole.reshape(*whole.shape[:2], -1), now, arena)

    def backward_input(self, w, dy, saved, arena):
        d, _ = self.inner.backward_input(w, dy, saved, arena)
        batch, length = d.shape[:2]
        q, k, v = np.split(d.reshape(batch, length, 3 * self.heads, self.each), 3, axis=2)
        grouped = (batch, length, self.kv_heads, -1, self.each)
        dx = np.concatenate([q, k.reshape(grouped).sum(3), v.reshape(grouped).sum(3)], 2)
        return dx.reshape(batch, length, -1), None

    def backward_weight(self, pending, dw, arena):
        pass


def units(layers, *, vocab, context, width, heads, kv_heads, depth, drops):
    """A GPT with grouped heads, and with dropout after the embedding and each half of a block."""
    draw = normal(0.2)

    def dropped(name):
        return {"drop": Dropout(layers, name)} if drops else {}

    found = [
        Unit(
            "embedding",
            Sequential(table=layers.embedding(vocab, context, width), **dropped("embedding")),
        )
    ]
    for block in range(depth):
        attention = Sequential(
            norm=layers.norm(width),
            qkv=layers.qkv(width, heads, draw, kv_heads),
            attention=GroupedAttention(layers, width, heads, kv_heads),
            out=layers.row_linear(width, width, draw),
            **dropped(f"attention {block}"),
        )
        mlp = Sequential(
            norm=layers.norm(width),
            up=layers.column_linear(width, 2 * width, draw, "gelu"),
            down=layers.row_linear(2 * width, width, draw),
            **dropped(f"mlp {block}"),
        )
        found += [
            Unit(f"{block}.attention", layers.residual(attention)),
            Unit(f"{block}.mlp", layers.residual(mlp)),
        ]
    head = Sequential(norm=layers.norm(width), logits=layers.head(width, vocab, draw))
    return [*found, Unit("head", head)]
