"""The peer's GPT with PyTorch's tensor parallelism: DTensors, ColwiseParallel, RowwiseParallel.

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

from mpitrain.tools.bench.training.torch_gpt import GPT, torch_name


def divide(
    model: GPT, arrays: Mapping[str, np.ndarray], mesh: DeviceMesh
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Shard the model over the mesh, copy our values, and return a function for gradients.

    That function is (inputs, targets) -> loss. Each half of a block is column-parallel, then
    row-parallel. The token table is sharded by rows, the logits by columns; the loss accepts
    sharded logits. Norms, positions and biases of row-parallel layers are replicated.

    arrays  this rank's shards as our layout.tp cuts them: queries, keys and values of its heads,
            one after the other
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
    """Copy our values to each rank's shards.

    PyTorch may cut the vocabulary at other rows than we do, so these tensors are gathered first.
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
