"""The peer: the same GPT in PyTorch, trained over gloo by what PyTorch has like our mode, and attention alone.

The one file that imports torch, on the CPU or a GPU. Products of float32 are whole: TF32, which keeps 10 bits, is off.

B batch, T tokens, C channels, H heads. Written with PyTorch's own layers and none of ours: a test compares the two.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from mpitrain import config
from mpitrain.errors import ConfigError
from mpitrain.machine.process import blas_threads, launched
from mpitrain.optim import learning_rate
from mpitrain.transport.base import Transport


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
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))

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
        return self.tokens(tokens) + self.positions.weight[:tokens.shape[1]]

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
        ("gain", "weight"), ("attention.norm", "norm1"), ("mlp.norm", "norm2"), ("attention.", ""), ("mlp.", ""),
        ("embedding.tokens", "tokens.weight"), ("embedding.positions", "positions.weight"), ("head.norm", "norm"),
        ("head.logits", "head"),
    ):
        name = name.replace(ours, theirs)
    return name


def copy_weights(arrays: Mapping[str, np.ndarray], model: GPT, is_whole: bool = True) -> None:
    """Give the model our values, by our names; every tensor must be given, unless the arrays are those of a stage."""
    tensors = dict(model.named_parameters())
    if is_whole and sorted(map(torch_name, arrays)) != sorted(tensors):
        raise ValueError(f"names differ: {sorted(map(torch_name, arrays))} and {sorted(tensors)}")
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[torch_name(name)].copy_(torch.from_numpy(array))


class Way(Protocol):
    """How PyTorch trains on all ranks. Made of the model, and for AdamW the groups of parameters and the other settings."""

    name: str
    optimizer: torch.optim.Optimizer

    def __init__(self, model: GPT, groups: list[dict[str, Any]], settings: dict[str, Any]): ...

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the gradients that the optimizer takes; gives the mean loss of these rows."""


class Alone:
    """One rank."""

    name = "torch"

    def __init__(self, model: GPT, groups: list[dict[str, Any]], settings: dict[str, Any]):
        self._model = model
        self.optimizer = torch.optim.AdamW(groups, **settings)

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _backward(self._model, inputs, targets)


class Replicas:
    """Every rank holds the model and the optimizer's state; gradients are all-reduced during the backward pass."""

    name = "torch DDP, gloo"

    def __init__(self, model: GPT, groups: list[dict[str, Any]], settings: dict[str, Any]):
        self._model = nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(groups, **settings)

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _backward(self._model, inputs, targets)


class ReplicasWithDividedState:
    """As `Replicas`, but each rank holds the optimizer's state of its share of the tensors, updates these and broadcasts them."""

    name = "torch ZeroRedundancyOptimizer, gloo"

    def __init__(self, model: GPT, groups: list[dict[str, Any]], settings: dict[str, Any]):
        self._model = nn.parallel.DistributedDataParallel(model)
        self.optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=True, **settings)

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _backward(self._model, inputs, targets)


class ShardedGradients:
    """Each rank holds its share of every tensor, of its gradient and of the optimizer's state. A block is gathered in the forward
    pass and stays gathered until the backward pass has used it; gradients are reduce-scattered.
    """

    name = "torch FSDP2 (reshard_after_forward=False), gloo"
    frees_after_forward = False

    def __init__(self, model: GPT, groups: list[dict[str, Any]], settings: dict[str, Any]):
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        device = next(model.parameters()).device.type
        mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
        for part in [*model.blocks, model]:
            fully_shard(part, mesh=mesh, reshard_after_forward=self.frees_after_forward)
        self._model, shares = model, dict(model.named_parameters())
        groups = [{**group, "params": [shares[names[id(tensor)]] for tensor in group["params"]]} for group in groups]
        self.optimizer = torch.optim.AdamW(groups, **settings)

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _backward(self._model, inputs, targets)


class ShardedParameters(ShardedGradients):
    """As `ShardedGradients`, but a block is freed after the forward pass and gathered again for the backward pass."""

    name = "torch FSDP2, gloo"
    frees_after_forward = True


class Stages:
    """Each rank holds some of the layers, the same as ours; micro-batches go through all ranks in the order of the schedule."""

    def __init__(self, schedule: type, micro_batches: int, names: Sequence[str], model: GPT, groups: list[dict[str, Any]],
                 settings: dict[str, Any]):
        """names: of this rank's units."""
        rank, self._size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.name = f"torch {schedule.__name__}, gloo"
        self._is_first, self._is_last = rank == 0, rank == self._size - 1
        stage = PipelineStage(Part(model, names), rank, self._size, next(model.parameters()).device)
        self._schedule = schedule(stage, micro_batches, loss_fn=mean_loss)
        self.optimizer = torch.optim.AdamW(groups, **settings)

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if self._is_last:
            self._schedule.step(target=targets, losses=losses)
            return self._size * torch.stack(losses).mean()  # of all rows, where the others have none
        self._schedule.step(*([inputs] if self._is_first else []))
        return torch.zeros(())


def _backward(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs, targets)
    loss.backward()
    return loss


WAYS: dict[int, type[Way]] = {0: Replicas, 1: ReplicasWithDividedState, 2: ShardedGradients, 3: ShardedParameters}
"""By replication.zero, for more than one rank."""

UNIT = re.compile(r"(?:^| )(embedding|blocks\.\d+\.attention|blocks\.\d+\.mlp|head)\.")
"""The name of the unit that a tensor of ours belongs to."""

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""By pipeline.schedule, for stages."""


class TorchPeer:
    """Trains a copy of our model as PyTorch does. Construction and steps are collective."""

    def __init__(self, transport: Transport, settings: config.Config, vocab: int, arrays: Mapping[str, np.ndarray]):
        self._device = placed(settings.device.kind)
        torch.set_num_threads(blas_threads())
        store = None
        if transport.rank == 0:
            store = torch.distributed.TCPStore(transport.hosts[0], 0, transport.size, is_master=True, wait_for_workers=False)
        port = transport.gather_text(store.port if store else 0)[0]
        store = store or torch.distributed.TCPStore(transport.hosts[0], port, transport.size, is_master=False)
        torch.distributed.init_process_group("gloo", store=store, rank=transport.rank, world_size=transport.size)
        m, o = settings.model, settings.optimizer
        model = GPT(vocab=vocab, context=m.context, width=m.width, heads=m.heads, depth=m.layers, tied=m.tied)
        stages = settings.layout.pp
        copy_weights(arrays, model, is_whole=stages == 1)
        model.to(self._device)
        self._settings = settings
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        way: Callable[..., Way] = WAYS[settings.replication.zero] if transport.size > 1 else Alone
        if stages > 1:
            names = list(dict.fromkeys(UNIT.findall(" ".join(arrays))))
            way = partial(Stages, SCHEDULES[settings.pipeline.schedule], settings.batch.micro_batches, names)
        self._way = way(
            model, [{"params": matrices, "weight_decay": o.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            {"lr": o.lr, "betas": (o.beta1, o.beta2), "eps": o.epsilon, "fused": True},
        )
        self.name = self._way.name

    def step(self, index: int, inputs: np.ndarray, targets: np.ndarray) -> float:
        """One optimizer step on this rank's rows; returns the loss of these rows alone."""
        optimizer = self._way.optimizer
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(self._settings.optimizer, index, self._settings.run.steps)
        optimizer.zero_grad(set_to_none=True)
        loss = self._way.gradients(*(torch.from_numpy(array).to(self._device) for array in (inputs, targets)))
        optimizer.step()
        return loss.item()

    def close(self) -> None:
        """Leave gloo."""
        torch.distributed.destroy_process_group()


class TorchAttention:
    """F.scaled_dot_product_attention, causal, forward and backward, of qkv: (B, T, 3C) as ours takes it."""

    def __init__(self, kind: str, qkv: np.ndarray, dy: np.ndarray, heads: int, dtype: str):
        def split(array: np.ndarray, parts: int) -> torch.Tensor:
            tensor = torch.from_numpy(array).to(placed(kind), getattr(torch, dtype))
            return tensor.view(*array.shape[:2], parts, heads, -1).permute(2, 0, 3, 1, 4)

        self._operands = [operand.detach().requires_grad_() for operand in split(qkv, 3)]
        self._dy, self._y = split(dy, 1)[0], None

    def forward(self) -> None:
        q, k, v = self._operands
        self._y = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward(self) -> None:
        torch.autograd.grad(self._y, self._operands, self._dy, retain_graph=True)


def placed(kind: str) -> torch.device:
    """Where our kind of device puts tensors; ConfigError if this PyTorch was not built for GPUs."""
    if kind != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"The peer cannot use the GPU: PyTorch {torch.__version__} finds none.",
                          "Install PyTorch for your CUDA (pip install torch), or leave out --peer.")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", launched().local_rank % torch.cuda.device_count())    # the same one as ours
