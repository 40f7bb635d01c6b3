"""Causal attention, with saved exponentials or in tiles, as memory.attention chooses.

B batch, T tokens, C channels. `saved` is the state of the body that ran, and knows its backward.
"""

from mpitrain.ops.host import attention_tiled, attention_whole
from mpitrain.ops.host.attention_next import attention_next

# From this many tokens on, tiles are at least as fast as saved exponentials, in far less memory.
TILED_FROM = 512


def attention(qkv, heads, arena):
    """Return (y, saved), in tiles from TILED_FROM tokens on.    qkv: (B, T, 3C); y: (B, T, C)"""
    body = attention_tiled if qkv.shape[1] >= TILED_FROM else attention_whole
    return body.attention(qkv, heads, arena)


def attention_backward(dy, saved, arena):
    """Return dqkv.    dy: (B, T, C); dqkv: (B, T, 3C)"""
    return saved.backward(dy, arena)


__all__ = ["FORWARDS", "attention", "attention_backward", "attention_next"]

FORWARDS = {
    "auto": attention,
    "tiled": attention_tiled.attention,
    "whole": attention_whole.attention,
}
"""The forward of each memory.attention."""
