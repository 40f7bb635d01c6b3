"""PyTorch's counterparts of our modes and layouts, over gloo.

Each counterpart is a function of the model, of this rank's arrays (by name) and of the
configuration.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from mpitrain.config import Config
from mpitrain.optim import RULES
from mpitrain.tools.bench.training.torch_gpt import GPT, Part, copy_weights, mean_loss
from mpitrain.tools.bench.training.torch_tensor_parallel import divide

Arrays = Mapping[str, np.ndarray]


class ReadyModel(NamedTuple):
    """A model that is ready for training.

    gradients  (inputs, targets) -> mean loss of these rows; also computes and reduces gradients
    """

    name: str
    gradients: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer


def alone(model: GPT, arrays: Arrays, settings: Config) -> ReadyModel:
    copy_weights(arrays, model)
    return ReadyModel("torch", partial(_backward, model), _optimizer(model, settings))


def replicas(model: GPT, arrays: Arrays, settings: Config) -> ReadyModel:
    """Train with DDP: a full replica per rank, and gradients all-reduced during backward."""
    copy_weights(arrays, model)
    return ReadyModel(
        "torch DDP, gloo",
        partial(_backward, nn.parallel.DistributedDataParallel(model)),
        _optimizer(model, settings),
    )


def compiled(model: GPT, arrays: Arrays, settings: Config) -> ReadyModel:
    """Train with DDP under torch.compile; one rank without DDP."""
    copy_weights(arrays, model)
    is_alone = torch.distributed.get_world_size() == 1
    name = "torch compiled" if is_alone else "torch DDP compiled, gloo"
    wrapped = model if is_alone else nn.parallel.DistributedDataParallel(model)
    return ReadyModel(name, partial(_backward, torch.compile(wrapped)), _optimizer(model, settings))


def divided_state(model: GPT, arrays: Arrays, settings: Config) -> ReadyModel:
    """Train with ZeroRedundancyOptimizer: DDP with a sharded optimizer, as ZeRO stage 1.

    Each rank updates some of the tensors and broadcasts them.
    """
    copy_weights(arrays, model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    kind, constants = _class(settings)
    optimizer = ZeroRedundancyOptimizer(
        _groups(model, settings), kind, parameters_as_bucket_view=True, **constants
    )
    return ReadyModel("torch ZeroRedundancyOptimizer, gloo", partial(_backward, wrapped), optimizer)


def divided_gradients(model: GPT, arrays: Arrays, settings: Config) -> ReadyModel:
    """Train with FSDP2 that gathers parameters once per step, as the counterpart of ZeRO stage 2.

    Each rank has a shard of every tensor, of its gradient and of the optimizer state. A block is
    all-gathered in forward and stays so until backward has used it. Gradients are reduce-scattered.
    """
    return _fully_sharded(
        "torch FSDP2 (reshard_after_forward=False), gloo", False, model, arrays, settings
    )


def divided_parameters(model: GPT, arrays: Arrays, settings: Config) -> ReadyModel:
    """Train with FSDP2 as ZeRO stage 3: a block is freed after forward, and gathered again."""
    return _fully_sharded("torch FSDP2, gloo", True, model, arrays, settings)


def _fully_sharded(
    name: str, frees_after_forward: bool, model: GPT, arrays: Arrays, settings: Config
) -> ReadyModel:
    copy_weights(arrays, model)
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=_mesh(model), reshard_after_forward=frees_after_forward)
    return ReadyModel(name, partial(_backward, model), _optimizer(model, settings))


def stages(model: GPT, arrays: Arrays, settings: Config) -> ReadyModel:
    """Train pipeline stages with the same layers as ours, by GPipe or 1F1B."""
    copy_weights(arrays, model, is_whole=False)
    names = list(dict.fromkeys(UNIT.findall(" ".join(arrays))))
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    kind = SCHEDULES[settings.pipeline.schedule]
    stage = PipelineStage(Part(model, names), rank, size, next(model.parameters()).device)
    schedule = kind(stage, settings.batch.micro_batches, loss_fn=mean_loss)

    def gradients(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if rank == size - 1:
            schedule.step(target=targets, losses=losses)
            # The caller averages losses over ranks, and only the last stage has one.
            return size * torch.stack(losses).mean()
        schedule.step(*([] if rank else [inputs]))
        return torch.zeros(())

    return ReadyModel(f"torch {kind.__name__}, gloo", gradients, _optimizer(model, settings))


def slices(model: GPT, arrays: Arrays, settings: Config) -> ReadyModel:
    """Train with tensor parallelism: heads, MLP and vocabulary are sharded as ours are."""
    gradients = divide(model, arrays, _mesh(model))
    return ReadyModel("torch tensor parallel, gloo", gradients, _optimizer(model, settings))


WAYS = {0: replicas, 1: divided_state, 2: divided_gradients, 3: divided_parameters}
"""{replication.zero: counterpart}."""

UNIT = re.compile(r"(?:^| )(embedding|blocks\.\d+\.attention|blocks\.\d+\.mlp|head)\.")
"""The unit's name at the start of the name of one of our tensors."""

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""{pipeline.schedule: PyTorch's schedule}."""


def way_of(settings: Config) -> Callable[[GPT, Arrays, Config], ReadyModel]:
    """Return PyTorch's counterpart of this configuration, on all ranks of gloo."""
    if settings.layout.tp > 1:
        return slices
    if settings.layout.pp > 1:
        return stages
    return WAYS[settings.replication.zero] if torch.distributed.get_world_size() > 1 else alone


def _backward(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs, targets)
    loss.backward()
    return loss


def _mesh(model: GPT) -> DeviceMesh:
    return init_device_mesh(
        next(model.parameters()).device.type, (torch.distributed.get_world_size(),)
    )


def _optimizer(model: GPT, settings: Config) -> torch.optim.Optimizer:
    kind, constants = _class(settings)
    return kind(_groups(model, settings), **constants)


def _groups(model: GPT, settings: Config) -> list[dict[str, Any]]:
    """Return parameter groups: matrices, which have weight decay, and vectors.

    DTensors have groups of their own, because PyTorch cannot update them together with tensors.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for tensor in model.parameters():
        is_matrix = tensor.dim() > 1
        decay = settings.optimizer.weight_decay if is_matrix else 0.0
        groups.setdefault((is_matrix, type(tensor.data)), {"params": [], "weight_decay": decay})[
            "params"
        ].append(tensor)
    return list(groups.values())


def _class(settings: Config) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    optimizer = settings.optimizer
    peer = RULES[optimizer.name].torch
    assert peer  # `peer_class` has refused other rules
    return getattr(torch.optim, peer.name), {
        "lr": optimizer.lr,
        "fused": True,
        **peer.arguments(optimizer),
    }
