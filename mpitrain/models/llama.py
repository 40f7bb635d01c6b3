"""Llama (Touvron et al. 2023) as a flat list of units: those of a GPT, with other layers inside.

Norms without a mean, rotary positions, heads that share keys and values, a gated MLP, no biases.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

import math
from collections.abc import Sequence

from mpitrain.layers.base import Unit
from mpitrain.layers.compose import Sequential
from mpitrain.layers.initial import normal
from mpitrain.layers.plain import Plain, Rotary


def llama(
    layers: Plain,
    *,
    vocab: int,
    context: int,
    width: int,
    heads: int,
    depth: int,
    hidden: int,
    kv_heads: int = 0,
    head_dim: int = 0,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    theta: float = 10_000.0,
    rope_scaling: Sequence[float] = (),
    tied: bool = False,
    activation: str = "silu",
    scaled_embedding: bool = False,
    epsilon: float = 1e-5,
    windows: Sequence[int] = (),
    experts: int = 0,
) -> list[Unit]:
    """Return the units of a Llama: tokens (B, T) to logits (B, T, vocab), for T up to context.

    Parameters
    ----------
    hidden : int
        Hidden units of each MLP.
    kv_heads : int
        Heads of keys and values, which divide heads; 0: as many as heads.
    head_dim : int
        Channels of a head; 0: width / heads.
    qk_norm : bool
        Whether each head of queries and of keys is normed before its rotation.
    qkv_bias : bool
        Whether queries, keys and values have biases.
    theta : float
        Base of the angles of rotary positions; the width of a head is even.
    rope_scaling : sequence of float
        Scaling of the angles, as model.rope_scaling. Empty: none.
    activation : {"silu", "gelu"}
        Activation of the gates of each MLP.
    scaled_embedding : bool
        Whether the embedding is multiplied by the square root of width.
    epsilon : float
        Term of the norms, added to the mean square.

    Others as of `gpt`.
    """
    std = 0.02 * (768 / width) ** 0.5  # as a GPT
    inner, onto_residual = normal(std), normal(std / (2 * max(1, depth)) ** 0.5)
    shared, inside = kv_heads or heads, heads * (head_dim or width // heads)
    rotary = Rotary(theta, context, tuple(rope_scaling))
    scale = math.sqrt(width) if scaled_embedding else 1.0
    embedding = layers.embedding(vocab, context, width, positions=False, scale=scale)
    gated = layers.geglu if activation == "gelu" else layers.swiglu
    units = [Unit("embedding", embedding)]
    for block in range(depth):
        attention = Sequential(
            norm=layers.rms_norm(width, epsilon),
            qkv=layers.qkv(width, heads, inner, shared, qkv_bias, head_dim),
            **({"norms": layers.head_norms(inside, heads, shared, epsilon)} if qk_norm else {}),
            attention=layers.attention(
                inside, heads, shared, rotary=rotary, window=windows[block] if windows else 0
            ),
            out=layers.row_linear(inside, width, onto_residual, bias=False),
        )
        norm = layers.rms_norm(width, epsilon)
        if experts:
            mlp = Sequential(
                norm=norm,
                experts=layers.experts(width, hidden, inner, onto_residual, is_gated=True),
            )
        else:
            up = layers.joined_linear(
                width, (hidden, hidden), 1, inner, bias=False, names=("gate", "up")
            )
            down = layers.row_linear(hidden, width, onto_residual, bias=False)
            mlp = Sequential(norm=norm, up=up, gate=gated(), down=down)
        units += [
            Unit(f"blocks.{block}.attention", layers.residual(attention)),
            Unit(f"blocks.{block}.mlp", layers.residual(mlp)),
        ]
    head = Sequential(norm=layers.rms_norm(width, epsilon), logits=layers.head(width, vocab, inner))
    return [*units, Unit("head", head, {"logits.weight": "embedding.tokens"} if tied else {})]
