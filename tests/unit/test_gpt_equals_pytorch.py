"""Our GPT is the model it says it is: an independent PyTorch GPT-2 has the same loss and gradients."""

import numpy as np
import pytest

from mpitrain.arena import Arena
from mpitrain.layers.plain import Plain
from mpitrain.models.gpt import gpt
from mpitrain.ops import host
from tests.unit.placing import place, run

torch = pytest.importorskip("torch")
F = torch.nn.functional

SHAPE = {"vocab": 101, "context": 40, "width": 48, "heads": 3, "depth": 3}


class Block(torch.nn.Module):
    """One GPT-2 block, written from the paper's description with PyTorch's own layers."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (a.view(batch, length, self.heads, -1).transpose(1, 2) for a in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(torch.nn.Module):
    def __init__(self, vocab, context, width, heads, depth, tied):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(vocab, width), torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def torch_name(name):
    """Where the PyTorch model keeps the tensor that we call `name`."""
    name = name.replace("gain", "weight")
    for ours, theirs in [("attention.norm", "norm1"), ("mlp.norm", "norm2"), ("attention.", ""), ("mlp.", ""),
                         ("embedding.tokens", "tokens.weight"), ("embedding.positions", "positions.weight"),
                         ("head.norm", "norm"), ("head.logits", "head")]:
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("length", [SHAPE["context"], 1, 17])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-4), (np.float64, 1e-9)])
def test_gpt_has_the_loss_and_gradients_of_pytorchs(dtype, tolerance, length, tied):
    units, arena = gpt(Plain(host), tied=tied, **SHAPE), Arena()
    weights, gradients, arrays, slots = place(units, 3, dtype)
    noise = np.random.default_rng(4)
    for array in arrays.values():  # biases that are 0 and gains that are 1 could not be seen missing
        array += 0.1 * noise.standard_normal(array.shape).astype(dtype)

    peer = GPT(tied=tied, **SHAPE).to(torch.float32 if dtype == np.float32 else torch.float64)
    tensors = dict(peer.named_parameters())
    assert sorted(map(torch_name, arrays)) == sorted(tensors)
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[torch_name(name)].copy_(torch.from_numpy(array))

    tokens = noise.integers(SHAPE["vocab"], size=(5, length + 1))
    x, targets = tokens[:, :-1], tokens[:, 1:]
    their_loss = peer(torch.from_numpy(x.copy()), torch.from_numpy(targets.copy()))
    their_loss.backward()

    def loss(logits):
        flat = logits.reshape(-1, SHAPE["vocab"])
        value, d = host.cross_entropy(flat, targets.reshape(-1), 1 / targets.size, arena)
        return value / targets.size, d.reshape(logits.shape)

    our_loss = run(units, weights, gradients, x, loss, arena)
    assert abs(our_loss - their_loss.item()) <= tolerance * abs(their_loss.item())
    for name, slot in slots.items():
        ours, theirs = slot.array, tensors[torch_name(name)].grad.numpy()
        assert ours.shape == theirs.shape
        # The key part of the qkv bias has gradient 0, and lies within a tensor that is measured as one.
        assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max(), name
