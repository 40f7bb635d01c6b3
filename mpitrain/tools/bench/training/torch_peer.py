"""The peer: the same GPT in PyTorch, trained over gloo with its counterpart of our mode.

It also has a separate attention, for `bench kernels`. It runs on the CPU or a GPU. Products of float32
have full precision: TF32, with 10 bits, is off. B batch, T tokens, C channels.
"""

import logging
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpitrain import config
from mpitrain.errors import ConfigError
from mpitrain.machine.process import blas_threads, launched
from mpitrain.optim import learning_rate
from mpitrain.tools.bench.training.torch_gpt import GPT, Rates
from mpitrain.tools.bench.training.torch_modes import compiled, way_of
from mpitrain.transport.base import Transport

COMPILERS = ("g++", "clang++")


class TorchPeer:
    """A copy of our model, trained by PyTorch. Construction and steps are collective.

    All peers of a process share the process group of gloo.
    """

    _ways = staticmethod(way_of)

    @staticmethod
    def check(settings: config.Config) -> None:
        """Raise ConfigError for a configuration that this peer alone cannot train; local."""

    def __init__(
        self,
        transport: Transport,
        settings: config.Config,
        vocab: int,
        arrays: Mapping[str, np.ndarray],
    ):
        """arrays: the tensors of our model on this rank, by name."""
        self._device = placed(settings.device.kind)
        torch.set_num_threads(blas_threads())
        _connect(transport)
        m = settings.model
        model = GPT(
            vocab=vocab,
            context=m.context,
            width=m.width,
            heads=m.heads,
            depth=m.layers,
            tied=m.tied,
            hidden=m.hidden,
            epsilon=m.epsilon,
            drops=Rates(m.dropout, m.attention_dropout),
        )
        self._settings = settings
        self._way = self._ways(settings)(model.to(self._device), arrays, settings)
        self.name = self._way.name

    def step(self, index: int, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Take an optimizer step on this rank's rows; return the loss of only these rows."""
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
        """Return lines about the measured steps; none by default."""
        return []

    def close(self) -> None:
        """Destroy the process group of gloo, unless another peer has done so."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class CompiledPeer(TorchPeer):
    """DDP under torch.compile, for the CPU by a C++ compiler. The first step compiles."""

    _ways = staticmethod(lambda settings: compiled)

    @staticmethod
    def check(settings: config.Config) -> None:
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


def _connect(transport: Transport) -> None:
    """Make the process group of gloo over all ranks, if there is none; collective."""
    if torch.distributed.is_initialized():
        return
    host, size, store = transport.hosts[0], transport.size, None
    if transport.rank == 0:
        store = torch.distributed.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
    port = transport.gather_text(store.port if store else 0)[0]
    store = store or torch.distributed.TCPStore(host, port, size, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=transport.rank, world_size=size)


class TorchAttention:
    """Causal F.scaled_dot_product_attention, forward and backward.

    On a GPU the backend is fixed: flash attention for 16-bit elements, else efficient attention.

    qkv  (B, T, 3C), as for our attention
    dy   (B, T, C)
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
    """Return PyTorch's device for our kind of device; ConfigError if PyTorch finds no GPU.

    For a GPU it also turns TF32 off.
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
