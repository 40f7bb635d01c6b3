"""Parameter groups: which tensor has which rate and decay, and the same update as PyTorch's groups."""

import tomllib

import numpy as np
import pytest
import tomli_w

from mpitrain.config import Optimizer, ParameterGroup, parse, with_settings
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Parameter, Unit
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import HostBackend
from mpitrain.ops.device import device_for
from mpitrain.optim import RULES, check_groups
from mpitrain.optim.optimizer import HyperParameters, group_of
from mpitrain.regions import Piece
from mpitrain.run.build import build
from mpitrain.run.job import with_hyper_parameters
from mpitrain.transport.threads import run_ranks
from tests.unit.run.test_run_dir import TINY, trained

NAMES = ("embedding.tokens", "blocks.0.up.weight", "blocks.0.up.bias", "head.weight")
GROUPS = '[{match="embedding.*", weight_decay=0.0, lr=0.5}, {match="*.bias", weight_decay=0.3}]'


def settings_of(*settings):
    return parse(with_settings({}, [f"optimizer.{setting}" for setting in settings])).optimizer


class Tensors:
    """A layer of tensors alone."""

    def parameters(self):
        shapes = {"tokens": (7, 4), "weight": (5, 9), "bias": (11,), "gain": (3,)}
        return [
            Parameter(name, shape, lambda rng, shape: rng.standard_normal(shape), len(shape) == 2)
            for name, shape in shapes.items()
        ]


def test_the_first_match_counts_and_other_tensors_decay_by_kind():
    settings = settings_of("weight_decay=0.2", f"groups={GROUPS}")
    found = [
        group_of(settings, Parameter(name, (2, 2), None, "bias" not in name)) for name in NAMES
    ]
    assert found == [
        HyperParameters(0.5, 0.0),
        HyperParameters(1.0, 0.2),
        HyperParameters(1.0, 0.3),
        HyperParameters(1.0, 0.2),
    ]
    assert group_of(Optimizer(), Parameter("norm.gain", (2,), None, False)) == HyperParameters(
        1.0, 0.0
    )
    again = parse(tomllib.loads(tomli_w.dumps({"optimizer": settings.model_dump()})))
    assert again.optimizer == settings and settings.groups[1] == ParameterGroup(
        match="*.bias", weight_decay=0.3
    )


@pytest.mark.parametrize(
    "groups, fragment",
    [
        ('[{match="nothing.*"}]', "nothing.*"),
        ('[{match="embedding.*"}, {match="embedding.tokens"}]', "embedding.tokens"),
    ],
)
def test_a_group_that_is_the_first_match_of_no_tensor_is_refused(groups, fragment):
    check_groups(settings_of(f"groups={GROUPS}"), NAMES)
    with pytest.raises(ConfigError) as raised:
        check_groups(settings_of(f"groups={groups}"), NAMES)
    assert fragment in raised.value.law


@pytest.mark.parametrize(
    "groups, fragment",
    [
        ("[{lr=0.5}]", "groups.0.match"),
        ('[{match="*", rate=0.5}]', "groups.0.rate"),
        ('[{match="*", lr=0.0}]', "groups.0.lr"),
        ('[{match="*", weight_decay=-1.0}]', "weight_decay"),
        ('[{match="*", lr=nan}]', "groups.0.lr"),
        ('{match="*"}', "optimizer.groups"),
        ("[1]", "groups.0"),
    ],
)
def test_keys_and_values_of_a_group_are_with_hyper_parameters(groups, fragment):
    with pytest.raises(ConfigError) as raised:
        settings_of(f"groups={groups}")
    assert fragment in raised.value.law


def stepped(name, groups, steps=10, kind="cpu"):
    """Tensors by name after some steps of a rule from gradients of each step, and the gradients."""
    settings = [
        f"optimizer.name={name}",
        "optimizer.weight_decay=0.1",
        f"optimizer.groups={groups}",
    ]
    section = with_hyper_parameters(parse(with_settings({}, settings))).optimizer
    device = device_for(kind)
    storage, rng = Storage([Unit("own", Tensors())], "float64"), np.random.default_rng(5)
    parameters, start = np.zeros(storage.length), {}
    storage.initialize(parameters, 0, HostBackend())
    start = {entry.name: entry.view(parameters).copy() for entry in storage.entries}
    cuts = [(0, 37), (37, storage.length)]
    pieces = [Piece(low, high, low) for low, high in cuts]
    gradients, flat = [], np.zeros(storage.length)
    arrays = {
        piece: (parameters[piece.start : piece.stop], flat[piece.start : piece.stop], None)
        for piece in pieces
    }
    rule = RULES[name]
    optimizer = rule.step.optimizer(
        rule, section, storage, arrays, device.ops, device.backend, device.arena()
    )
    for step in range(1, steps + 1):
        for entry in storage.entries:
            entry.view(flat)[...] = rng.standard_normal(entry.parameter.local_shape)
        gradients.append({entry.name: entry.view(flat).copy() for entry in storage.entries})
        optimizer.update(0.5, 0.03, step)
    found = {entry.name: entry.view(parameters).copy() for entry in storage.entries}
    return section, start, gradients, found


TORCH = {
    "sgd": ("SGD", lambda s: {}),
    "momentum": ("SGD", lambda s: {"momentum": s.momentum}),
    "nesterov": ("SGD", lambda s: {"momentum": s.momentum, "nesterov": True}),
    "adam": ("Adam", lambda s: {"betas": (s.beta1, s.beta2), "eps": s.epsilon}),
    "adamw": ("AdamW", lambda s: {"betas": (s.beta1, s.beta2), "eps": s.epsilon}),
}


@pytest.mark.product
@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda-sim", marks=pytest.mark.compile)])
def test_ten_steps_with_groups_equal_pytorch_with_its_own(name, kind):
    """In float64, in two pieces, one of which begins within a tensor."""
    torch = pytest.importorskip("torch")
    groups = '[{match="own.tokens", weight_decay=0.0, lr=0.5}, {match="*.gain", weight_decay=0.3}]'
    section, start, gradients, found = stepped(name, groups, kind=kind)
    kind, arguments = TORCH[name]
    tensors = {key: torch.tensor(value, requires_grad=True) for key, value in start.items()}
    own = {"own.tokens": (0.015, 0.0), "own.weight": (0.03, 0.1), "own.bias": (0.03, 0.0)}
    own["own.gain"] = (0.03, 0.3)
    listed = [
        {"params": [tensors[key]], "lr": lr, "weight_decay": decay}
        for key, (lr, decay) in own.items()
    ]
    peer = getattr(torch.optim, kind)(listed, lr=0.1, **arguments(section))
    for step in gradients:
        for key, gradient in step.items():
            tensors[key].grad = torch.tensor(0.5 * gradient)
        peer.step()
    for key, tensor in tensors.items():
        np.testing.assert_allclose(found[key], tensor.detach().numpy(), rtol=0, atol=1e-9)
        assert np.abs(found[key] - start[key]).max() > 0.01


def test_a_tensor_wise_rule_steps_with_the_rate_and_the_decay_of_the_group(monkeypatch):
    from tests.cases.rules import TOYS

    monkeypatch.setitem(RULES, "normalised", TOYS["normalised"])
    groups = '[{match="own.tokens", weight_decay=0.0, lr=0.5}, {match="*.gain", weight_decay=0.3}]'
    _, start, gradients, found = stepped("normalised", groups, steps=1)
    own = {"own.tokens": (0.015, 0.0), "own.weight": (0.03, 0.1), "own.gain": (0.03, 0.3)}
    for key, (lr, decay) in own.items():
        g = 0.5 * gradients[0][key] + decay * start[key]
        wanted = start[key] - lr * g / (np.linalg.norm(g) + 1e-7)
        np.testing.assert_allclose(found[key], wanted, rtol=0, atol=1e-12)


def test_a_run_goes_on_with_its_groups_alone(tmp_path):
    folder = tmp_path / "run"
    groups = f"optimizer.groups={GROUPS}"
    trained(folder, groups)
    assert len(trained(folder, "run.steps=4", resume="yes")) == 4
    with pytest.raises(ConfigError, match="groups"):
        trained(folder, "run.steps=5", "optimizer.groups=[]", resume="yes")


@pytest.mark.parametrize("ranks, layout", [(1, []), (3, []), (2, ["layout.pp=2"])])
def test_every_rank_refuses_a_pattern_without_a_match(ranks, layout):
    groups = 'optimizer.groups=[{match="embedding.*"}, {match="block.*"}]'
    config = parse(
        with_settings({}, [*TINY, groups, "batch.size=12", "batch.micro_batches=2", *layout])
    )

    def run(transport):
        with pytest.raises(ConfigError, match="block"):
            build(transport, config)
        return True

    assert all(run_ranks(ranks, run))
