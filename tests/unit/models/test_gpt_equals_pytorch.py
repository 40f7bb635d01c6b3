"""Our GPT is the model it says it is: an independent PyTorch GPT-2 has the same loss and gradients."""

import numpy as np
import pytest

from mpitrain.layers.plain import Plain
from mpitrain.machine.backend import Arena
from mpitrain.models.gpt import gpt
from mpitrain.ops.device import host_ops
from tests.unit.placing import place, run

host = host_ops()

torch = pytest.importorskip("torch")
torch_gpt = pytest.importorskip(
    "mpitrain.tools.bench.training.torch_gpt"
)  # PyTorch's own layers and none of ours

SHAPE = {"vocab": 101, "context": 40, "width": 48, "heads": 3, "depth": 3}


@pytest.mark.product
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("length", [SHAPE["context"], 1, 17])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-4), (np.float64, 1e-9)])
def test_gpt_has_the_loss_and_gradients_of_pytorchs(dtype, tolerance, length, tied):
    units, arena = gpt(Plain(host), tied=tied, **SHAPE), Arena()
    weights, gradients, arrays, slots = place(units, 3, dtype)
    noise = np.random.default_rng(4)
    for (
        array
    ) in arrays.values():  # biases that are 0 and gains that are 1 could not be seen missing
        array += 0.1 * noise.standard_normal(array.shape).astype(dtype)

    peer = torch_gpt.GPT(tied=tied, **SHAPE).to(
        torch.float32 if dtype == np.float32 else torch.float64
    )
    tensors = dict(peer.named_parameters())
    torch_gpt.copy_weights(arrays, peer)

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
        ours, theirs = slot.array, tensors[torch_gpt.torch_name(name)].grad.numpy()
        assert ours.shape == theirs.shape
        # The key part of the qkv bias has gradient 0, and lies within a tensor that is measured as one.
        assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max(), name
