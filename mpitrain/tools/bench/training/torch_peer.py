"""The PyTorch peer of `compare`: the same model, trained over a backend of PyTorch in the counterpart of our layout.

A Llama is that of transformers. The module also has PyTorch's attention for `bench kernels`. Both run on the CPU or on a GPU.
Float32 products have full precision: TF32 is off. Legend: B batch, T tokens, C channels.
"""

import logging
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.machine.process import blas_threads, launched
from mpitrain.optim import RULES, learning_rate
from mpitrain.tools.bench.torch_groups import process_group
from mpitrain.tools.bench.training.torch_gpt import GPT, Part, copy_weights, divide, mean_loss
from mpitrain.transport.base import Transport

Arrays = Mapping[str, np.ndarray]
COMPILERS = ("g++", "clang++")
UNIT = re.compile(r"(?:^| )(embedding|blocks\.\d+\.attention|blocks\.\d+\.mlp|head)\.")
"""The unit's name at the start of the name of one of our tensors."""
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""{pipeline.schedule: PyTorch's schedule}."""


class ReadyModel(NamedTuple):
    """A model that is ready for training.

    gradients  (inputs, targets) -> mean loss of these rows; also computes and reduces gradients
    """

    name: str
    gradients: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer


def alone(model: nn.Module, arrays: Arrays, settings: Config, group: ProcessGroup) -> ReadyModel:
    return ReadyModel("torch", partial(_backward, model), _optimizer(model, settings))


def replicas(model: nn.Module, arrays: Arrays, settings: Config, group: ProcessGroup) -> ReadyModel:
    return ReadyModel(
        _name("torch DDP", group),
        partial(_backward, nn.parallel.DistributedDataParallel(model, process_group=group)),
        _optimizer(model, settings),
    )


def compiled(model: nn.Module, arrays: Arrays, settings: Config, group: ProcessGroup) -> ReadyModel:
    is_alone = group.size() == 1
    name = "torch compiled" if is_alone else _name("torch DDP compiled", group)
    wrapped = model if is_alone else nn.parallel.DistributedDataParallel(model, process_group=group)
    return ReadyModel(name, partial(_backward, torch.compile(wrapped)), _optimizer(model, settings))


def divided_parameters(
    model: Any, arrays: Arrays, settings: Config, group: ProcessGroup
) -> ReadyModel:
    """Return a model under FSDP2: the counterpart of ZeRO stage 3.

    A block is all-gathered in forward, freed, and gathered again in backward.
    """
    mesh = _mesh(model, group)
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh)
    name = _name("torch FSDP2", group)
    return ReadyModel(name, partial(_backward, model), _optimizer(model, settings))


def stages(model: GPT, arrays: Arrays, settings: Config, group: ProcessGroup) -> ReadyModel:
    names = list(dict.fromkeys(UNIT.findall(" ".join(arrays))))
    rank, size = group.rank(), group.size()
    kind = SCHEDULES[settings.pipeline.schedule]
    device = next(model.parameters()).device
    stage = PipelineStage(Part(model, names), rank, size, device, group=group)
    schedule = kind(stage, settings.batch.micro_batches, loss_fn=mean_loss)

    def gradients(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if rank == size - 1:
            schedule.step(target=targets, losses=losses)
            # The caller averages losses over ranks, and only the last stage has one.
            return size * torch.stack(losses).mean()
        schedule.step(*([] if rank else [inputs]))
        return torch.zeros(())

    name = _name(f"torch {kind.__name__}", group)
    return ReadyModel(name, gradients, _optimizer(model, settings))


def slices(model: GPT, arrays: Arrays, settings: Config, group: ProcessGroup) -> ReadyModel:
    gradients = divide(model, arrays, _mesh(model, group))
    name = _name("torch tensor parallel", group)
    return ReadyModel(name, gradients, _optimizer(model, settings))


WAYS = {0: replicas, 3: divided_parameters}
"""{replication.zero: counterpart}."""


def way_of(
    settings: Config, group: ProcessGroup
) -> Callable[[Any, Arrays, Config, ProcessGroup], ReadyModel]:
    """Return the function that builds PyTorch's counterpart of this configuration."""
    if settings.layout.tp > 1:
        return slices
    if settings.layout.pp > 1:
        return stages
    return WAYS[settings.replication.zero] if group.size() > 1 else alone


def _backward(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs, targets)
    loss.backward()
    return loss


def _name(way: str, group: ProcessGroup) -> str:
    return f"{way}, {torch.distributed.get_backend(group)}"


def _mesh(model: nn.Module, group: ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, next(model.parameters()).device.type)


def _optimizer(model: nn.Module, settings: Config) -> torch.optim.Optimizer:
    optimizer = settings.optimizer
    peer = RULES[optimizer.name].torch
    assert peer  # `peer_class` has refused other rules
    kind: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, peer.name)
    constants = peer.arguments(optimizer)
    return kind(_groups(model, settings), lr=optimizer.lr, fused=True, **constants)


def _groups(model: nn.Module, settings: Config) -> list[dict[str, Any]]:
    """Return parameter groups of the optimizer: matrices with weight decay, vectors without.

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


def _network(settings: Config, vocab: int, arrays: Arrays) -> Any:
    """Return the model with our values; with layout.tp the division of layers copies them."""
    m = settings.model
    if m.kind == "llama":
        from mpitrain.tools.bench.hugging_face import WithLoss, copied  # needs transformers

        return WithLoss(copied(m, vocab, arrays))
    model = GPT(
        vocab=vocab,
        context=m.context,
        width=m.width,
        heads=m.heads,
        depth=m.layers,
        tied=m.tied,
        hidden=m.hidden,
        epsilon=m.epsilon,
    )
    if settings.layout.tp == 1:
        copy_weights(arrays, model, is_whole=settings.layout.pp == 1)
    return model


class TorchPeer:
    """A copy of our model that PyTorch trains. Construction and steps are collective.

    All peers of a process over one backend share its process group.
    """

    _ways = staticmethod(way_of)

    @staticmethod
    def check(settings: Config) -> None:
        """Raise ConfigError for a configuration that this peer cannot train. No message is sent."""

    def __init__(
        self,
        transport: Transport,
        settings: Config,
        vocab: int,
        arrays: Arrays,
        backend: str = "gloo",
    ):
        """arrays  {our name: tensor of our model on this rank}"""
        self._device = placed(settings.device.kind)
        torch.set_num_threads(blas_threads())
        group = process_group(transport, backend)
        model = _network(settings, vocab, arrays)
        self._settings = settings
        self._way = self._ways(settings, group)(model.to(self._device), arrays, settings, group)
        self.name = self._way.name

    def step(self, index: int, inputs: np.ndarray, targets: np.ndarray) -> float:
        optimizer = self._way.optimizer
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(self._settings.optimizer, index, self._settings.run.steps)
        optimizer.zero_grad(set_to_none=True)
        loss = self._way.gradients(
            *(torch.from_numpy(array).to(self._device) for array in (inputs, targets))
        )
        optimizer.step()
        return loss.item()

    def notes(self) -> list[str]:
        return []

    def close(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class CompiledPeer(TorchPeer):
    """DDP under torch.compile, which on the CPU needs a C++ compiler. The first step compiles."""

    _ways = staticmethod(lambda settings, group: compiled)

    @staticmethod
    def check(settings: Config) -> None:
        layout, zero = settings.layout, settings.replication.zero
        if layout.tp > 1 or layout.pp > 1 or zero:
            raise ConfigError(
                "The compiled peer is DDP, but layout.tp, layout.pp and replication.zero are "
                f"{layout.tp}, {layout.pp} and {zero}.",
                "Use --peer torch.",
            )
        if not any(map(shutil.which, COMPILERS)):
            raise ConfigError(
                f"torch.compile needs a C++ compiler, but none of {', '.join(COMPILERS)} is there.",
                "Install g++, or leave out --peer torch-compiled.",
            )

    def __init__(self, *arguments: Any):
        torch._dynamo.reset()
        torch._logging.set_logs(dynamo=logging.ERROR)  # `notes` reports the graph breaks.
        counters.clear()
        super().__init__(*arguments)

    def notes(self) -> list[str]:
        breaks = [
            f"{count} x {reason.splitlines()[0].removesuffix('.')}"
            for reason, count in counters["graph_break"].items()
        ]
        graphs = counters["stats"]["unique_graphs"]
        return [f"torch.compile: {graphs} graphs; graph breaks: {'; '.join(breaks) or 'none'}"]


class TorchAttention:
    """PyTorch's causal scaled_dot_product_attention, forward and backward.

    On a GPU the backend is fixed: flash attention for 16-bit elements, else efficient attention.

    qkv  queries, keys and values, (B, T, 3C), as for our attention
    dy   gradient of the result, (B, T, C)
    """

    def __init__(self, kind: str, qkv: np.ndarray, dy: np.ndarray, heads: int, dtype: str):
        def split(array: np.ndarray, parts: int) -> torch.Tensor:
            tensor = torch.from_numpy(array).to(placed(kind), getattr(torch, dtype))
            return tensor.view(*array.shape[:2], parts, heads, -1).permute(2, 0, 3, 1, 4)

        self._operands = [operand.detach().requires_grad_() for operand in split(qkv, 3)]
        self._dy, self._y = split(dy, 1)[0], None
        fused = SDPBackend.EFFICIENT_ATTENTION if dtype == "float32" else SDPBackend.FLASH_ATTENTION
        self._backends = (
            [fused] if kind == "cuda" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        )

    def forward(self) -> None:
        q, k, v = self._operands
        with sdpa_kernel(self._backends):
            self._y = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward(self) -> None:
        torch.autograd.grad(self._y, self._operands, self._dy, retain_graph=True)


def placed(kind: str) -> torch.device:
    """Return PyTorch's device for our kind of device; for a GPU, TF32 is turned off.

    raises  ConfigError if PyTorch finds no GPU
    """
    if kind != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"The peer cannot use the GPU: PyTorch {torch.__version__} finds none.",
            "Install PyTorch for your CUDA (pip install torch), or leave out --peer.",
        )
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    # Our backend takes the same GPU.
    return torch.device("cuda", launched().local_rank % torch.cuda.device_count())
