"""The peer's GPT divided by PyTorch's tensor parallelism: DTensors, ColwiseParallel and RowwiseParallel.

B batch, T tokens, C channels, V vocabulary, n ranks.
"""

from collections.abc import Callable, Mapping

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

from mpitrain.bench.training.torch_gpt import GPT, torch_name


def divide(
    model: GPT, arrays: Mapping[str, np.ndarray], mesh: DeviceMesh
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Leave each rank its part of the model, with our values; returns what computes gradients of inputs and targets.

    Each half of a block is columns and then rows; the table of tokens is split by rows, the logits by columns, and the loss takes
    them so. Norms, positions and biases of rows are whole on every rank.

    arrays  this rank's parts, as our layout.tp cuts them: queries, keys and values of its heads, one behind the other
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
    """Give each rank's part our values; the vocabulary, which PyTorch may cut elsewhere than we do, by way of the whole."""
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
