"""BERT (Devlin et al. 2018) as a flat list of units: an encoder, and a head of one of two kinds.

The units are the embedding, its norm, 2 x depth half-blocks norm(x + f(x)), and the head.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

from mpitrain.layers.base import Unit, normal
from mpitrain.layers.plain import FirstToken, GeluErf, Plain, Sequential, Tanh

TYPES = 2
"""Token types: that of a first text, and that of a second one."""


def bert(
    layers: Plain,
    *,
    vocab: int,
    context: int,
    width: int,
    heads: int,
    depth: int,
    tied: bool = False,
    hidden: int = 0,
    epsilon: float = 1e-12,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    classes: int = 0,
) -> list[Unit]:
    """Return the units of a BERT: tokens (B, T) to logits (B, T, vocab), for T up to context.

    With classes, the logits are (B, classes), of the first token of each row.

    Parameters
    ----------
    epsilon : float
        Term of the LayerNorms, added to the variance.
    dropout : float
        Rate of dropout of the embedding, of each branch before its residual sum, and of the input
        of the classes.
    classes : int
        Classes of a row; 0: the model predicts tokens.

    Others as of `gpt`; tied is for the head of tokens.
    """
    std = 0.02 * (768 / width) ** 0.5  # as a GPT
    inner, hidden = normal(std), hidden or 4 * width
    units = [
        Unit("embedding", layers.embedding(vocab, context, width, types=TYPES)),
        Unit("start", layers.dropped(layers.norm(width, epsilon), dropout)),
    ]
    for block in range(depth):
        attention = Sequential(
            qkv=layers.qkv(width, heads, inner),
            attention=layers.attention(width, heads, dropout=attention_dropout, causal=False),
            out=layers.dropped(layers.row_linear(width, width, inner), dropout),
        )
        mlp = Sequential(
            up=layers.column_linear(width, hidden, inner),
            gelu=GeluErf(layers.ops),
            down=layers.dropped(layers.row_linear(hidden, width, inner), dropout),
        )
        units += [
            Unit(
                f"blocks.{block}.{name}",
                Sequential(sum=layers.residual(branch), norm=layers.norm(width, epsilon)),
            )
            for name, branch in (("attention", attention), ("mlp", mlp))
        ]
    if classes:
        pooler = layers.linear(width, width, inner)
        head = Sequential(
            first=FirstToken(),
            pooler=pooler,
            tanh=layers.dropped(Tanh(layers.ops), dropout),
            classes=layers.linear(width, classes, inner),
        )
        return [*units, Unit("head", head)]
    head = Sequential(
        transform=layers.linear(width, width, inner),
        gelu=GeluErf(layers.ops),
        norm=layers.norm(width, epsilon),
        logits=layers.head(width, vocab, inner, bias=True),
    )
    return [*units, Unit("head", head, {"logits.weight": "embedding.tokens"} if tied else {})]
