"""GPT in PyTorch's own layers with our weights, whole, as a pipeline stage, or tensor-parallel.

A test compares it with our GPT. Legend: B batch, T tokens.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, epsilon: float):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, epsilon), nn.LayerNorm(width, epsilon)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, -1))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """The GPT-2 architecture. forward: (tokens (B, T), targets (B, T)) -> mean loss."""

    def __init__(
        self,
        *,
        vocab: int,
        context: int,
        width: int,
        heads: int,
        depth: int,
        tied: bool,
        hidden: int = 0,
        epsilon: float = 1e-5,
    ):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, hidden or 4 * width, epsilon) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width, epsilon), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        return mean_loss(self.logits(x), targets)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Part(nn.Module):
    """A pipeline stage of a GPT: the layers that correspond to our units of these names."""

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
    """Return the mean cross-entropy of logits (B, T, vocabulary) and targets (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def torch_name(name: str) -> str:
    """Return the name in `GPT` of the tensor that mpitrain calls `name`."""
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
    """Copy our arrays into the tensors of the model.

    16-bit arrays are converted to float32 first, because PyTorch takes no bfloat16 from NumPy.

    arrays    {our name of the tensor: array}
    is_whole  every tensor must have an array; False for a pipeline stage
    """
    tensors = dict(model.named_parameters())
    if is_whole and sorted(map(torch_name, arrays)) != sorted(tensors):
        raise ValueError(f"names differ: {sorted(map(torch_name, arrays))} and {sorted(tensors)}")
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[torch_name(name)].copy_(
                torch.from_numpy(array.astype("float32") if array.itemsize == 2 else array)
            )


def divide(
    model: GPT, arrays: Mapping[str, np.ndarray], mesh: DeviceMesh
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Make the model tensor-parallel over the mesh, with our values; return its function of the loss.

    The function is (inputs, targets) -> loss. In each half of a block, the first layer is
    column-parallel and the second one row-parallel. The table of tokens is sharded by rows, the
    logits by columns; the loss takes sharded logits. Norms, positions and biases of row-parallel
    layers are replicated.

    arrays  this rank's shards as layout.tp cuts them: queries, keys and values of its heads, one
            after the other
    source  PyTorch's tutorial "Large Scale Transformer model training with Tensor Parallel"
    """
    is_tied = model.head.weight is model.tokens.weight
    for block in model.blocks:
        assert isinstance(block.heads, int)
        block.heads //= mesh.size()
        parallelize_module(
            block,
            mesh,
            {
                "qkv": ColwiseParallel(),
                "out": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            },
        )
    parallelize_module(
        model,
        mesh,
        {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    if is_tied:
        model.head.weight = model.tokens.weight
    _copy_parts(arrays, model, mesh)

    def gradients(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            x = model.embedded(inputs)
            for block in model.blocks:
                x = block(x)
            loss: torch.Tensor = F.cross_entropy(model.logits(x).flatten(0, 1), targets.flatten())
            loss.backward()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    return gradients


def _copy_parts(arrays: Mapping[str, np.ndarray], model: nn.Module, mesh: DeviceMesh) -> None:
    """Copy our values into the shards of each rank.

    PyTorch may cut the vocabulary at other rows than we do, so our shards of it are gathered first.
    """
    tensors = dict(model.named_parameters())
    assert sorted(map(torch_name, arrays)) == sorted(tensors)
    with torch.no_grad():
        for name, array in arrays.items():
            tensor = tensors[torch_name(name)]
            if name in ("embedding.tokens", "head.logits.weight"):
                parts: list[np.ndarray] = [array] * mesh.size()
                torch.distributed.all_gather_object(parts, array)
                tensor.copy_(
                    distribute_tensor(torch.from_numpy(np.concatenate(parts)), mesh, [Shard(0)])
                )
            else:
                own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                own.copy_(torch.from_numpy(array))
