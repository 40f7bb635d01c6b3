"""Gradient compression for DistributedDataParallel, as a communication hook."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from mpitrain.collectives.compression import Matrix
from mpitrain.collectives.engine.arithmetic import parse_wire
from mpitrain.errors import ConfigError


def hook(wire: str) -> Callable[[Any, dist.GradBucket], Future[torch.Tensor]]:
    """Return a hook for `register_comm_hook(state, hook)`: gradients are averaged in a wire format.

    state   the process group of backend mpitrain, or None for the default one
    wire    "fp16", "bf16", "int8", "topk:R" or "powersgd:K", as `replication.wire`; the last two keep
            what they did not send for the next step
    raises  ConfigError for an unknown wire; of a bucket whose gradients are not float32
    """
    parsed = parse_wire(wire)

    def average(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        group, total = state or dist.group.WORLD, bucket.buffer()
        if total.dtype != torch.float32:
            raise ConfigError(
                f"mpitrain.torch.hook({wire!r}) compresses float32 gradients, but a bucket has {total.dtype}.",
                "Keep the parameters in float32, or leave out the hook.",
            )
        work = group.average_lossy(total, bucket.index(), parsed, matrices_of(bucket))
        return work.get_future().then(lambda ended: ended.value()[0])

    return average


def matrices_of(bucket: Any) -> list[Matrix]:
    """Return where the gradients of two dims or more lie in the bucket, as matrices."""
    first = bucket.buffer().storage_offset()
    return [
        Matrix(g.storage_offset() - first, len(g), g.numel() // len(g), g.numel() // len(g))
        for g in bucket.gradients()
        if g.dim() > 1 and g.numel()
    ]
