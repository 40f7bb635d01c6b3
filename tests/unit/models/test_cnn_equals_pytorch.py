"""Convolution, max-pooling and the whole cnn have the values and gradients of PyTorch's in float64."""

import numpy as np
import pytest

from mpitrain.layers.plain import Plain
from mpitrain.machine.backend import Arena
from mpitrain.models.classifiers import cnn
from mpitrain.ops.device import host_ops, ops_for
from mpitrain.ops.host import layers
from tests.cases.numbers import numbers
from tests.unit.placing import place, run

torch = pytest.importorskip("torch")
host = host_ops()
TINY = 1e-12


def near(ours, theirs, tolerance=TINY):
    theirs = theirs.detach().numpy()
    assert ours.shape == theirs.shape
    error = np.abs(ours - theirs).max(initial=0)
    assert error <= tolerance * max(1, np.abs(theirs).max(initial=0))


def last(tensor):
    """(B, C, H, W) -> (B, H, W, C)."""
    return tensor.movedim(1, 3)


@pytest.mark.product
@pytest.mark.parametrize("tile", [1, 3000, layers.TILE_BYTES])
@pytest.mark.parametrize("side", [1, 3, 7])
@pytest.mark.parametrize("shape", [(2, 5, 7, 3), (1, 1, 1, 1), (5, 2, 3, 4), (0, 4, 4, 2)])
def test_a_convolution_over_any_tiles_is_pytorchs(shape, side, tile, monkeypatch):
    monkeypatch.setattr(layers, "TILE_BYTES", tile)
    arena, (*_, channels), outputs = Arena(), shape, 6
    x, b = numbers(1, *shape), numbers(3, outputs)
    w, dy = numbers(2, outputs, side * side * channels), numbers(4, *shape[:3], outputs)
    given = torch.tensor(x).movedim(3, 1).requires_grad_()
    kernel = torch.tensor(w.reshape(outputs, side, side, channels)).movedim(3, 1).requires_grad_()
    bias = torch.tensor(b, requires_grad=True)
    out = torch.nn.functional.conv2d(given, kernel, bias, padding="same")
    out.backward(torch.tensor(dy).movedim(3, 1))
    y, saved = host.conv2d(x, w, b, side, arena)
    near(y, last(out))
    near(host.conv2d_backward_input(dy, w, side, arena), last(given.grad))
    for before in (0.0, 1.5):
        dw, db = np.full_like(w, before), np.full_like(b, before)
        host.conv2d_backward_weight(dy, saved, dw, side, before > 0, arena)
        host.conv2d_backward_bias(dy, db, before > 0, arena)
        near(dw - before, last(kernel.grad).reshape(outputs, -1))
        near(db - before, bias.grad)


@pytest.mark.parametrize(
    ("shape", "size"), [((2, 6, 4, 3), 2), ((1, 7, 5, 2), 3), ((2, 3, 9, 1), 1), ((0, 4, 4, 1), 2)]
)
def test_a_max_pooling_is_pytorchs_with_equal_numbers_too(shape, size):
    x, arena = np.round(numbers(1, *shape)), Arena()
    given = torch.tensor(x).movedim(3, 1).requires_grad_()
    out = torch.nn.functional.max_pool2d(given, size)
    y, saved = host.max_pool(x, size, arena)
    near(y, last(out))
    dy = numbers(2, *y.shape)
    out.backward(torch.tensor(dy).movedim(3, 1))
    near(host.max_pool_backward(dy, saved, size, arena), last(given.grad))


class Peer(torch.nn.Module):
    """The network of PyTorch's own layers: two convolutions of 3 x 3 and one hidden layer."""

    def __init__(self, arrays):
        super().__init__()
        self.tensors = {name: torch.tensor(a, requires_grad=True) for name, a in arrays.items()}

    def forward(self, x):
        t, F = self.tensors, torch.nn.functional
        for i in range(2):
            name = f"convolutions.{i}.conv"
            w = t[f"{name}.weight"]
            w = w.reshape(len(w), 3, 3, -1).movedim(3, 1)
            x = F.max_pool2d(F.conv2d(x, w, t[f"{name}.bias"], padding=1).relu(), 2)
        x = x.movedim(1, 3).flatten(1)
        x = F.linear(x, t["hidden.0.weight"], t["hidden.0.bias"]).relu()
        return F.linear(x, t["head.weight"], t["head.bias"])


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("cpu", np.float64, 1e-10),
        pytest.param("cuda-sim", np.float64, 1e-10, marks=pytest.mark.compile),
    ],
)
def test_a_cnn_has_the_loss_and_gradients_of_pytorchs(kind, dtype, tolerance):
    ops = ops_for(kind)
    units, arena = (
        cnn(Plain(ops), shape=(2, 9, 8), channels=[4, 5], hidden=[11], classes=7),
        Arena(),
    )
    weights, gradients, arrays, slots = place(units, 3, dtype)
    for seed, array in enumerate(arrays.values()):
        array += 0.1 * numbers(seed, *array.shape)
    x, targets = numbers(1, 5, 2, 9, 8), np.arange(5) % 7
    peer = Peer(arrays)
    theirs = torch.nn.functional.cross_entropy(peer(torch.tensor(x)), torch.tensor(targets))
    theirs.backward()

    def loss(logits):
        value, d = ops.cross_entropy(logits, targets, 1 / 5, arena)
        return value / 5, d

    ours = run(units, weights, gradients, x, loss, arena)
    assert abs(ours - theirs.item()) <= tolerance * abs(theirs.item())
    for name, slot in slots.items():
        near(slot.array, peer.tensors[name].grad, tolerance)
