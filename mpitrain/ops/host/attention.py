"""Causal attention, with saved exponentials or in tiles, as memory.attention chooses.

B batch, T tokens, C channels. `saved` is the state of the body that ran, and knows its backward.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from mpitrain.ops.host import attention_tiled, attention_whole
from mpitrain.ops.random_bits import AttentionMask

# From this many tokens on, tiles are at least as fast as saved exponentials, in far less memory.
TILED_FROM = 512


def attention(qkv, heads, arena):
    """Return (y, saved), in tiles from TILED_FROM tokens on.    qkv: (B, T, 3C); y: (B, T, C)"""
    return _body(qkv).attention(qkv, heads, arena)


def attention_backward(dy, saved, arena):
    """Return dqkv.    dy: (B, T, C); dqkv: (B, T, 3C)"""
    return saved.backward(dy, arena)


def attention_dropout(qkv, heads, key, step, first, every, rate, arena):
    """Return (y, saved) as `attention`, with dropout of the probabilities."""
    return _dropping(_body)(qkv, heads, key, step, first, every, rate, arena)


attention_dropout_backward = attention_backward


def _body(qkv: Any) -> Any:
    return attention_tiled if qkv.shape[1] >= TILED_FROM else attention_whole


def _dropping(body: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return attention with dropout.    body: (qkv) -> the module of the body"""

    def run(qkv, heads, key, step, first, every, rate, arena):
        mask = AttentionMask(key, step, first, every, rate, qkv.shape[1])
        return body(qkv).attended(qkv, heads, mask, arena)

    return run


class Forwards(NamedTuple):
    """The two forwards of a memory.attention."""

    attention: Callable[..., Any]
    attention_dropout: Callable[..., Any]


FORWARDS = {
    "auto": Forwards(attention, attention_dropout),
    "tiled": Forwards(attention_tiled.attention, _dropping(lambda qkv: attention_tiled)),
    "whole": Forwards(attention_whole.attention, _dropping(lambda qkv: attention_whole)),
}
"""The forwards of each memory.attention."""
