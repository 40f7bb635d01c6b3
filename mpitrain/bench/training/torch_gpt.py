"""The peer's model: a GPT of PyTorch's own layers and none of ours, which a test compares with ours, and how it gets our values.

B batch, T tokens, C channels, H heads.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """One GPT-2 block, (B, T, C) -> (B, T, C)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Its first half."""
        batch, length, _ = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, -1))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Its second half."""
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 architecture; called with tokens and targets, both (B, T), it gives the mean loss."""

    def __init__(self, *, vocab: int, context: int, width: int, heads: int, depth: int, tied: bool):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        return mean_loss(self.logits(x), targets)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T) -> (B, T, C)."""
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, vocab)."""
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Part(nn.Module):
    """The part of a GPT that units of ours with these names are, in their order."""

    def __init__(self, model: GPT, names: Sequence[str]):
        super().__init__()
        self._model, self._names = model, names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        model = self._model
        for name in self._names:
            if name in ("embedding", "head"):
                x = model.embedded(x) if name == "embedding" else model.logits(x)
            else:
                _, number, half = name.split(".")
                x = getattr(model.blocks[int(number)], half)(x)
        return x


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of logits (B, T, vocab) and targets (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def torch_name(name: str) -> str:
    """Where `GPT` keeps the tensor that mpitrain calls `name`."""
    for ours, theirs in (
        ("gain", "weight"),
        ("attention.norm", "norm1"),
        ("mlp.norm", "norm2"),
        ("attention.", ""),
        ("mlp.", ""),
        ("embedding.tokens", "tokens.weight"),
        ("embedding.positions", "positions.weight"),
        ("head.norm", "norm"),
        ("head.logits", "head"),
    ):
        name = name.replace(ours, theirs)
    return name


def copy_weights(arrays: Mapping[str, np.ndarray], model: GPT, is_whole: bool = True) -> None:
    """Give the model our values, by our names; every tensor must be given, unless the arrays are those of a stage.

    Those of 16 bits go as float32: PyTorch takes no bfloat16 of NumPy's.
    """
    tensors = dict(model.named_parameters())
    if is_whole and sorted(map(torch_name, arrays)) != sorted(tensors):
        raise ValueError(f"names differ: {sorted(map(torch_name, arrays))} and {sorted(tensors)}")
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[torch_name(name)].copy_(
                torch.from_numpy(array.astype("float32") if array.itemsize == 2 else array)
            )
