"""The Layer contract beside its laws: what chains free and refuse, names, and initial values."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.layers.base import READING, Unit, normal
from mpitrain.layers.plain import Norm, Plain, Residual, Sequential
from mpitrain.machine.backend import Arena, HostBackend
from mpitrain.models.gpt import gpt
from mpitrain.ops.device import host_ops, reference_ops
from tests.laws.layers import LayerLaws
from tests.laws.transport import laws_of
from tests.unit.placing import place, run

host, reference = host_ops(), reference_ops()

SMALL = {"vocab": 11, "context": 9, "width": 12, "heads": 3, "depth": 2}


class Hoarder:
    """A layer whose saved state is a buffer, and which notes how much is leased when its backward half begins."""

    output_is_free = False

    def __init__(self, notes):
        self.notes = notes

    def parameters(self):
        return []

    def forward(self, w, x, now, arena):
        return x, arena.take((64,), np.uint8)

    def backward_input(self, w, dy, saved, arena):
        self.notes.append(arena.live)
        return dy, None

    def backward_weight(self, pending, dw, arena):
        pass


@pytest.mark.parametrize(
    "backward",
    [
        lambda chain, y, saved, arena: chain.backward_input({}, y, saved, arena),
        lambda chain, y, saved, arena: chain.backward({}, y, saved, {}, arena),
    ],
    ids=("halves", "both"),
)
def test_sequential_backward_frees_each_childs_buffers_first(backward):
    notes, arena = [], Arena()
    chain = Sequential(a=Hoarder(notes), b=Hoarder(notes), c=Hoarder(notes))
    y, saved = chain.forward({}, np.zeros(1), READING, arena)
    backward(chain, y, saved, arena)
    assert notes == [192, 128, 64]


def test_unnamed_layers_are_numbered_and_equal_named_units():
    plain, x = Plain(host), np.random.default_rng(0).standard_normal((3, 6))
    layers = plain.linear(6, 5, normal(1.0), "relu"), plain.linear(5, 4, normal(1.0))
    assert [parameter.name for parameter in Sequential(*layers).parameters()] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    ]
    found = []
    for units in (
        [Unit("net", Sequential(*layers))],
        [Unit(f"net.{name}", layer) for name, layer in enumerate(layers)],
    ):
        weights, gradients, _, slots = place(units, 1, np.float64)
        loss = run(units, weights, gradients, x, lambda y: (float((y * y).sum()), 2 * y), Arena())
        found.append((loss, {name: slot.array.tolist() for name, slot in slots.items()}))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "make, law",
    [
        (lambda a: Sequential(), "got 0 without and 0 with names"),
        (lambda a: Sequential(a, down=a), "got 1 without and 1 with names"),
        (lambda a: Sequential([a, a]), "Sequential takes layers, but '0' is of type list"),
        (lambda a: Sequential(a, None), "Sequential takes layers, but '1' is of type NoneType"),
    ],
)
def test_what_is_no_chain_of_layers_is_refused_in_words(make, law):
    with pytest.raises(ConfigError, match=law):
        make(Plain(host).norm(6))


@pytest.mark.product
@pytest.mark.parametrize("ops", [reference, host])
@pytest.mark.parametrize("law", laws_of(LayerLaws))
def test_layers_obey(law, ops):
    getattr(LayerLaws(), law)(Plain(ops), HostBackend())


def test_the_shortcuts_of_a_gpt_add_in_place():
    """Each would otherwise hold one more buffer from forward to backward."""
    shortcuts = [
        unit.layer for unit in gpt(Plain(host), **SMALL) if isinstance(unit.layer, Residual)
    ]
    assert len(shortcuts) == 2 * SMALL["depth"] and all(
        layer.inner.output_is_free for layer in shortcuts
    )


def test_names_and_shapes_of_a_gpt():
    units = gpt(Plain(host), tied=True, **SMALL)
    names = {f"{unit.name}.{p.name}": p.shape for unit in units for p in unit.layer.parameters()}
    assert names["embedding.tokens"] == (11, 12)
    assert names["embedding.positions"] == (9, 12)
    assert names["blocks.0.attention.qkv.weight"] == (36, 12)
    assert names["blocks.1.mlp.up.bias"] == (48,)
    assert names["head.logits.weight"] == (11, 12)
    assert units[-1].tied == {"logits.weight": "embedding.tokens"}
    assert len(names) == 2 + 2 * (6 + 6) + 3


@pytest.mark.parametrize("width, std", [(768, 0.02), (192, 0.04)])
def test_initial_values_are_those_of_gpt_2_at_its_width(width, std):
    units = gpt(Plain(host), vocab=16, context=8, width=width, heads=4, depth=2)
    _, _, arrays, _ = place(units, 1, np.float64)
    assert arrays["blocks.1.mlp.up.weight"].std() == pytest.approx(std, rel=0.02)
    assert arrays["blocks.1.mlp.down.weight"].std() == pytest.approx(std / 4**0.5, rel=0.02)
    assert not arrays["blocks.1.mlp.up.bias"].any()
    assert (arrays["head.norm.gain"] == 1).all()


def test_only_matrices_are_decayed():
    for unit in gpt(Plain(host), **SMALL):
        for parameter in unit.layer.parameters():
            assert parameter.decayed == (len(parameter.shape) == 2), parameter.name


def test_heads_must_divide_the_width_and_the_nearest_are_named():
    with pytest.raises(
        ConfigError, match=r"5 heads do not divide a width of 12\.(.|\n)*Nearest that does: 4"
    ):
        gpt(Plain(host), **{**SMALL, "heads": 5})


def test_a_layer_norm_adds_its_own_epsilon_to_the_variance():
    x, w = np.float64([[1, -1]]), {"gain": np.ones(2), "bias": np.zeros(2)}
    for epsilon in (3.0, 0.5625):
        y, _ = Norm(host, 2, epsilon).forward(w, x, READING, Arena())
        np.testing.assert_allclose(y, x / (1 + epsilon) ** 0.5, rtol=1e-15)
