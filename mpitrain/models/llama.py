"""Llama (Touvron et al. 2023) as a flat list of units: those of a GPT, with other layers inside.

Norms without a mean, rotary positions, heads that share keys and values, a gated MLP, no biases.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

import math

from mpitrain.config import Model
from mpitrain.layers.base import Layer, Unit, normal
from mpitrain.layers.plain import Plain, Rotary, Sequential


def llama(layers: Plain, vocab: int, model: Model) -> list[Unit]:
    """Return the units of a Llama: tokens (B, T) to logits (B, T, vocab), for T up to the context.

    Parameters
    ----------
    model : section
        [model] of a configuration, such as `Config().model`: width, heads and all others.
    """
    width, heads, shared = model.width, model.heads, model.kv_heads or model.heads
    std = 0.02 * (768 / width) ** 0.5  # as a GPT
    inner, onto_residual = normal(std), normal(std / (2 * model.layers) ** 0.5)
    inside = heads * model.head_channels
    rotary = Rotary(model.theta, model.context, tuple(model.rope_scaling))
    within = Rotary(model.window_theta, model.context) if model.window_theta else rotary
    scale = math.sqrt(width) if model.scaled_embedding else model.embedding_scale
    embedding = layers.embedding(vocab, model.context, width, positions=False, scale=scale)

    def norm() -> Layer:
        return layers.rms_norm(width, model.epsilon)

    def branch(**children: Layer) -> Layer:
        """Return a residual branch: the layers, after a norm, before another, or between both."""
        before = {"norm": norm()} if model.pre_norm else {}
        after = {"post": norm()} if model.post_norm else {}
        return layers.residual(
            Sequential(**before, **children, **after, **scaled(model.residual_scale))
        )

    def scaled(factor: float) -> dict[str, Layer]:
        return {} if factor == 1 else {"scaled": layers.scaled(factor)}

    def head_norms() -> dict[str, Layer]:
        is_joint = model.qk_norm == "joint"
        if not model.qk_norm:
            return {}
        return {"norms": layers.head_norms(inside, heads, shared, model.epsilon, is_joint)}

    def mlp_of(block: int) -> dict[str, Layer]:
        if model.experts and block not in model.dense_blocks:
            sizes = width, model.hidden_units
            return {"experts": layers.experts(*sizes, inner, onto_residual, is_gated=True)}
        gate = layers.geglu() if model.activation == "gelu" else layers.swiglu()
        return layers.mlp(width, model.dense_units, inner, onto_residual, gate)

    units = [Unit("embedding", embedding)]
    for block, window in enumerate(model.windows):
        has_positions = not model.nope_every or (block + 1) % model.nope_every > 0
        attention = branch(
            qkv=layers.qkv(width, heads, inner, shared, model.qkv_bias, model.head_dim),
            **head_norms(),
            **({"clip": layers.clip(model.clip_qkv)} if model.clip_qkv else {}),
            attention=layers.attention(
                *(inside, heads, shared),
                rotary=(within if window else rotary) if has_positions else None,
                window=window,
                scale=model.score_scale,
                cap=model.score_cap,
            ),
            out=layers.row_linear(inside, width, onto_residual, bias=False),
        )
        mlp = branch(**mlp_of(block))
        units += [Unit(f"blocks.{block}.attention", attention), Unit(f"blocks.{block}.mlp", mlp)]
    head = Sequential(
        norm=norm(),
        **scaled(model.logit_scale),
        logits=layers.head(width, vocab, inner),
        **({"cap": layers.soft_cap(model.logit_cap)} if model.logit_cap else {}),
    )
    tied = {"logits.weight": "embedding.tokens"} if model.tied else {}
    return [*units, Unit("head", head, tied)]
