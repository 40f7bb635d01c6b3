"""The peer: the same GPT in PyTorch, trained by its DistributedDataParallel over gloo, and attention alone.

The one file that imports torch, on the CPU or a GPU. Products of float32 are whole: TF32, which keeps 10 bits, is off.

B batch, T tokens, C channels, H heads. Written with PyTorch's own layers and none of ours: a test compares the two.
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn

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
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
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
        x = self.tokens(tokens) + self.positions.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def torch_name(name: str) -> str:
    """Where `GPT` keeps the tensor that mpitrain calls `name`."""
    for ours, theirs in (
        ("gain", "weight"), ("attention.norm", "norm1"), ("mlp.norm", "norm2"), ("attention.", ""), ("mlp.", ""),
        ("embedding.tokens", "tokens.weight"), ("embedding.positions", "positions.weight"), ("head.norm", "norm"),
        ("head.logits", "head"),
    ):
        name = name.replace(ours, theirs)
    return name


def copy_weights(arrays: Mapping[str, np.ndarray], model: GPT) -> None:
    """Give the model our values, by our names; every tensor must be given."""
    tensors = dict(model.named_parameters())
    if sorted(map(torch_name, arrays)) != sorted(tensors):
        raise ValueError(f"names differ: {sorted(map(torch_name, arrays))} and {sorted(tensors)}")
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[torch_name(name)].copy_(torch.from_numpy(array))


class TorchPeer:
    """Trains a copy of our model as PyTorch does. Construction and steps are collective."""

    def __init__(self, transport: Transport, settings: config.Config, vocab: int, arrays: Mapping[str, np.ndarray]):
        self.name = "torch DDP, gloo" if transport.size > 1 else "torch"
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
        copy_weights(arrays, model)
        model.to(self._device)
        self._settings = settings
        self._model = nn.parallel.DistributedDataParallel(model) if transport.size > 1 else model
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": o.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=o.lr, betas=(o.beta1, o.beta2), eps=o.epsilon, fused=True,
        )

    def step(self, index: int, inputs: np.ndarray, targets: np.ndarray) -> float:
        """One optimizer step on this rank's rows; returns the loss of these rows alone."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._settings.optimizer, index, self._settings.run.steps)
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._model(*(torch.from_numpy(array).to(self._device) for array in (inputs, targets)))
        loss.backward()
        self._optimizer.step()
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
