"""GPT-2 (Radford et al. 2019) as a flat list of units: embedding, 2 x depth half-blocks x + f(norm(x)), head."""

from __future__ import annotations  # so that help() prints signatures as they are written here

from mpitrain.layers.base import Unit
from mpitrain.layers.compose import Sequential
from mpitrain.layers.initial import normal
from mpitrain.layers.plain import Plain


def gpt(
    layers: Plain,
    *,
    vocab: int,
    context: int,
    width: int,
    heads: int,
    depth: int,
    tied: bool = False,
) -> list[Unit]:
    """Units of a GPT-2: tokens (B, T) to logits (B, T, vocab), for T up to context.

    Parameters
    ----------
    layers : Plain
        Makes the layers.
    vocab, context, width, heads : int
        Entries of the vocabulary, learned positions, channels, and attention heads: a divisor of width.
    depth : int
        Transformer blocks; each is two units.
    tied : bool
        The weight of the head is the token embedding.
    """
    # GPT-2's 0.02 is the right spread for its width of 768; narrower layers need more to keep the variance of what passes.
    std = 0.02 * (768 / width) ** 0.5
    inner = normal(std)
    # 2 depth branches are added to the stream; scaling each keeps its variance as it was (section 2.3).
    onto_residual = normal(std / (2 * max(1, depth)) ** 0.5)
    units = [Unit("embedding", layers.embedding(vocab, context, width))]
    for block in range(depth):
        attention = Sequential(
            norm=layers.norm(width),
            qkv=layers.qkv(width, heads, inner),
            attention=layers.attention(width, heads),
            out=layers.row_linear(width, width, onto_residual),
        )
        mlp = Sequential(
            norm=layers.norm(width),
            up=layers.column_linear(width, 4 * width, inner, activation="gelu"),
            down=layers.row_linear(4 * width, width, onto_residual),
        )
        units += [
            Unit(f"blocks.{block}.attention", layers.residual(attention)),
            Unit(f"blocks.{block}.mlp", layers.residual(mlp)),
        ]
    head = Sequential(norm=layers.norm(width), logits=layers.head(width, vocab, inner))
    return [*units, Unit("head", head, {"logits.weight": "embedding.tokens"} if tied else {})]
