"""Llama (Touvron et al. 2023) as a flat list of units: those of a GPT, with other layers inside.

Norms without a mean, rotary positions, heads that share keys and values, a gated MLP, no biases.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

import math
from collections.abc import Sequence

from mpitrain.layers.base import Layer, Unit
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
    qk_norm: bool | str = False,
    post_norm: bool = False,
    qkv_bias: bool = False,
    theta: float = 10_000.0,
    rope_scaling: Sequence[float] = (),
    tied: bool = False,
    activation: str = "silu",
    scaled_embedding: bool = False,
    epsilon: float = 1e-5,
    windows: Sequence[int] = (),
    window_theta: float = 0.0,
    score_scale: float = 0.0,
    score_cap: float = 0.0,
    logit_cap: float = 0.0,
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
    qk_norm : bool or "joint"
        Whether each head of queries and of keys is normed before its rotation, or all of a token
        together.
    qkv_bias : bool
        Whether queries, keys and values have biases.
    theta : float
        Base of the angles of rotary positions; the width of a head is even.
    activation : {"silu", "gelu"}
        Activation of the gates of each MLP.
    epsilon : float
        Term of the norms, added to the mean square.

    Others as the keys of [model], or as of `gpt`.
    """
    std = 0.02 * (768 / width) ** 0.5  # as a GPT
    inner, onto_residual = normal(std), normal(std / (2 * max(1, depth)) ** 0.5)
    shared, inside = kv_heads or heads, heads * (head_dim or width // heads)
    rotary = Rotary(theta, context, tuple(rope_scaling))
    within = Rotary(window_theta, context) if window_theta else rotary
    scale = math.sqrt(width) if scaled_embedding else 1.0
    embedding = layers.embedding(vocab, context, width, positions=False, scale=scale)
    gated = layers.geglu if activation == "gelu" else layers.swiglu

    def branch(**children: Layer) -> Layer:
        """Return a residual branch: a norm, the layers, and with post_norm a norm of their output."""
        after = {"post": layers.rms_norm(width, epsilon)} if post_norm else {}
        inner_layers = Sequential(norm=layers.rms_norm(width, epsilon), **children, **after)
        return layers.residual(inner_layers)

    def head_norms() -> dict[str, Layer]:
        is_joint = qk_norm == "joint"
        if not qk_norm:
            return {}
        return {"norms": layers.head_norms(inside, heads, shared, epsilon, is_joint)}

    units = [Unit("embedding", embedding)]
    for block in range(depth):
        window = windows[block] if windows else 0
        attention = branch(
            qkv=layers.qkv(width, heads, inner, shared, qkv_bias, head_dim),
            **head_norms(),
            attention=layers.attention(
                *(inside, heads, shared),
                rotary=within if window else rotary,
                window=window,
                scale=score_scale,
                cap=score_cap,
            ),
            out=layers.row_linear(inside, width, onto_residual, bias=False),
        )
        if experts:
            mlp = branch(experts=layers.experts(width, hidden, inner, onto_residual, is_gated=True))
        else:
            mlp = branch(
                up=layers.joined_linear(
                    width, (hidden, hidden), 1, inner, bias=False, names=("gate", "up")
                ),
                gate=gated(),
                down=layers.row_linear(hidden, width, onto_residual, bias=False),
            )
        units += [Unit(f"blocks.{block}.attention", attention), Unit(f"blocks.{block}.mlp", mlp)]
    head = Sequential(
        norm=layers.rms_norm(width, epsilon),
        logits=layers.head(width, vocab, inner),
        **({"cap": layers.soft_cap(logit_cap)} if logit_cap else {}),
    )
    return [*units, Unit("head", head, {"logits.weight": "embedding.tokens"} if tied else {})]
