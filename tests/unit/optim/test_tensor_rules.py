"""LAMB, Adafactor and Muon: ten steps in float64 equal PyTorch's, or the paper's lines, on the host and in kernels."""

import numpy as np
import pytest

from mpitrain.config import parse, with_settings
from mpitrain.layers.base import Parameter, Unit
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import Arena
from mpitrain.ops.device import device_for
from mpitrain.optim import RULES
from mpitrain.optim.rules import is_hidden_matrix
from mpitrain.regions import Piece
from mpitrain.run.job import with_hyper_parameters

STEPS, LR, SCALE = 10, 0.03, 0.5
SHAPES = {"wide": (5, 9), "tall": (8, 3), "row": (1, 6), "table": (7, 4), "bias": (11,)}
DEVICES = pytest.mark.parametrize(
    "kind", ["cpu", pytest.param("cuda-sim", marks=pytest.mark.compile)]
)


class Tensors:
    """A layer of tensors alone; biases begin at 0."""

    def parameters(self):
        return [
            Parameter(
                name,
                shape,
                lambda rng, shape: rng.standard_normal(shape) * (len(shape) > 1),
                len(shape) > 1,
                role="embedding" if name == "table" else "",
            )
            for name, shape in SHAPES.items()
        ]


def stepped(kind, *settings, steps=STEPS):
    """The settings, and the tensors before and after some steps with the gradients of each."""
    given = parse(with_settings({}, [f"optimizer.{setting}" for setting in settings]))
    section, device = with_hyper_parameters(given).optimizer, device_for(kind)
    storage, rng = Storage([Unit("own", Tensors())], "float64"), np.random.default_rng(5)
    backend, piece = device.backend, Piece(0, storage.length, 0)
    parameters, flat = (backend.zeros(storage.length, "float64") for _ in range(2))
    storage.initialize(parameters, 0, backend)
    rule, arrays = RULES[section.name], {piece: (parameters, flat, None)}
    optimizer = rule.step.optimizer(rule, section, storage, arrays, device.ops, backend, Arena())
    start, gradients = tensors(storage, backend.to_host(parameters)), []
    for step in range(1, steps + 1):
        drawn = np.zeros(storage.length)
        for entry in storage.entries:
            entry.view(drawn)[...] = rng.standard_normal(entry.parameter.local_shape)
        gradients.append(tensors(storage, SCALE * drawn))
        backend.put(flat, drawn)
        optimizer.update(SCALE, LR, step)
    return section, start, gradients, tensors(storage, backend.to_host(parameters))


def tensors(storage, flat):
    return {
        entry.name.removeprefix("own."): entry.view(flat).copy()
        for entry in sorted(storage.entries)
    }


def assert_equal(found, truth, start):
    for name, array in truth.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-9, err_msg=name)
        assert np.abs(found[name] - start[name]).max() > 1e-4, name


def by_torch(optimizers, start, gradients):
    """The tensors after PyTorch's steps; (names, decay) -> optimizer of tensors."""
    import torch

    found = {name: torch.tensor(array, requires_grad=True) for name, array in start.items()}
    peers = [make([found[name] for name in names]) for names, make in optimizers]
    for step in gradients:
        for name, gradient in step.items():
            found[name].grad = torch.tensor(gradient)
        for peer in peers:
            peer.step()
    return {name: tensor.detach().numpy() for name, tensor in found.items()}


@DEVICES
@pytest.mark.parametrize("lr", (LR, 0.9), ids=("small", "large"))
def test_adafactor_is_that_of_pytorch(kind, lr, monkeypatch):
    """With a large rate the relative step is that of the step's number."""
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(globals(), "LR", lr)
    _, start, gradients, found = stepped(kind, "name=adafactor", "weight_decay=0.1")

    def of(decay):
        return lambda mine: torch.optim.Adafactor(mine, lr=lr, weight_decay=decay)

    matrices = [name for name, shape in SHAPES.items() if len(shape) > 1]
    truth = by_torch([(matrices, of(0.1)), (["bias"], of(0.0))], start, gradients)
    assert_equal(found, truth, start)


@DEVICES
@pytest.mark.parametrize("adjust, steps", [("match_rms_adamw", 5), ("original", 4)])
def test_muon_is_that_of_pytorch_without_its_cast_and_adamw_elsewhere(
    kind, adjust, steps, monkeypatch
):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    section, start, gradients, found = stepped(
        kind, "name=muon", f"adjust_lr_fn={adjust}", f"ns_steps={steps}"
    )

    def adamw(decay):
        betas = section.beta1, section.beta2
        return lambda mine: torch.optim.AdamW(mine, lr=LR, betas=betas, weight_decay=decay)

    def muon(mine):
        own = {"momentum": 0.95, "ns_steps": steps, "adjust_lr_fn": adjust}
        return torch.optim.Muon(mine, lr=LR, weight_decay=0.1, **own)

    optimizers = [(["wide", "tall", "row"], muon), (["table"], adamw(0.1)), (["bias"], adamw(0))]
    assert_equal(found, by_torch(optimizers, start, gradients), start)


def test_muon_steps_hidden_matrices_alone():
    found = [is_hidden_matrix(parameter) for parameter in Tensors().parameters()]
    assert found == [True, True, True, False, False]
    assert not is_hidden_matrix(Parameter("w", (2, 3), None, True, role="head"))
    assert not is_hidden_matrix(Parameter("w", (2, 3, 4), None, True))


@DEVICES
def test_lamb_is_algorithm_2_of_its_paper(kind):
    section, start, gradients, found = stepped(kind, "name=lamb")
    beta1, beta2, epsilon = section.beta1, section.beta2, section.epsilon
    assert (beta1, beta2, epsilon, section.weight_decay) == (0.9, 0.999, 1e-6, 0.01)
    truth = {name: array.copy() for name, array in start.items()}
    ratios = []
    for name, x in truth.items():
        m, v, decay = 0, 0, section.weight_decay if x.ndim > 1 else 0
        for t, gradient in enumerate((step[name] for step in gradients), 1):
            m = beta1 * m + (1 - beta1) * gradient
            v = beta2 * v + (1 - beta2) * gradient**2
            r = m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + epsilon)
            norm, step = np.linalg.norm(x), np.linalg.norm(r + decay * x)
            ratios.append(norm / step if norm and step else 1)
            x -= LR * ratios[-1] * (r + decay * x)
    assert_equal(found, truth, start)
    assert 1 in ratios and np.ptp(ratios) > 0.5
