"""GPT-2 (Radford et al. 2019) as a flat list of units.

The units are the embedding, 2 x depth half-blocks x + f(norm(x)), and the head.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Sequence

from mpitrain.layers.base import Unit, normal
from mpitrain.layers.plain import Plain, Sequential


def gpt(
    layers: Plain,
    *,
    vocab: int,
    context: int,
    width: int,
    heads: int,
    depth: int,
    tied: bool = False,
    hidden: int = 0,
    epsilon: float = 1e-5,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    windows: Sequence[int] = (),
    experts: int = 0,
) -> list[Unit]:
    """Return the units of a GPT-2: tokens (B, T) to logits (B, T, vocab), for T up to context.

    Parameters
    ----------
    layers : Plain
        Makes the layers.
    vocab, context : int
        Entries of the vocabulary, and learned positions.
    width, heads : int
        Channels, and attention heads; heads divide width.
    depth : int
        Transformer blocks; each is two units.
    tied : bool
        Whether the head uses the token embedding as its weight.
    hidden : int
        Hidden units of each MLP; 0: 4 width.
    epsilon : float
        Term of the LayerNorms, added to the variance.
    dropout : float
        Rate of dropout of the embedding, and of each branch before its residual sum.
    attention_dropout : float
        Rate of dropout of the attention probabilities.
    windows : sequence of int
        The window of each block's attention; 0: none. Empty: none has one.
    experts : int
        MLPs of each block, of which a router chooses some for each token; 0: one, without a router.
    """
    # GPT-2 uses 0.02 for its width of 768. Narrower layers need a larger standard deviation to
    # preserve the variance of activations.
    std = 0.02 * (768 / width) ** 0.5
    inner, hidden = normal(std), hidden or 4 * width
    # The residual stream sums 2 depth branches. Scaling each preserves its variance (section 2.3).
    onto_residual = normal(std / (2 * max(1, depth)) ** 0.5)
    embedding = layers.dropped(layers.embedding(vocab, context, width), dropout)
    units = [Unit("embedding", embedding)]
    for block in range(depth):
        attention = Sequential(
            norm=layers.norm(width, epsilon),
            qkv=layers.qkv(width, heads, inner),
            attention=layers.attention(
                width, heads, dropout=attention_dropout, window=windows[block] if windows else 0
            ),
            out=layers.dropped(layers.row_linear(width, width, onto_residual), dropout),
        )
        norm = layers.norm(width, epsilon)
        if experts:
            mixture = layers.experts(width, hidden, inner, onto_residual)
            mlp = Sequential(norm=norm, experts=layers.dropped(mixture, dropout))
        else:
            mlp = Sequential(
                norm=norm,
                up=layers.column_linear(width, hidden, inner, activation="gelu"),
                down=layers.dropped(layers.row_linear(hidden, width, onto_residual), dropout),
            )
        units += [
            Unit(f"blocks.{block}.attention", layers.residual(attention)),
            Unit(f"blocks.{block}.mlp", layers.residual(mlp)),
        ]
    head = Sequential(norm=layers.norm(width, epsilon), logits=layers.head(width, vocab, inner))
    return [*units, Unit("head", head, {"logits.weight": "embedding.tokens"} if tied else {})]
