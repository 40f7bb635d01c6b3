"""The Layer contract, kept by the whole GPT and MLP: what may be written, what is allocated, how gradients add up."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit
from mpitrain.layers.compose import Residual, Sequential
from mpitrain.layers.initial import normal
from mpitrain.layers.plain import Norm, Plain
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import HostBackend
from mpitrain.models.classifiers import mlp
from mpitrain.models.gpt import gpt
from mpitrain.ops import bodies
from tests.laws.layers import LayerLaws
from tests.laws.transport import laws_of
from tests.unit.placing import place, run

host, reference = bodies.host(), bodies.reference()

SMALL = {"vocab": 11, "context": 9, "width": 12, "heads": 3, "depth": 2}


def sequences(rows, seed=0):
    tokens = np.random.default_rng(seed).integers(SMALL["vocab"], size=(rows, SMALL["context"] + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_against(ops, targets, scale, arena):
    """A loss for `run` over logits (B, T, V)."""

    def loss(logits):
        value, d = ops.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), scale, arena
        )
        return value * scale, d.reshape(logits.shape)

    return loss


def gradients_of(ops, batches, tied=False, dtype=np.float64):
    """Loss and gradients summed over micro-batches."""
    units, arena = gpt(Plain(ops), tied=tied, **SMALL), Arena()
    weights, gradients, _, slots = place(units, 1, dtype)
    scale = 1 / sum(targets.size for _, targets in batches)
    loss = sum(
        run(units, weights, gradients, x, loss_against(ops, t, scale, arena), arena)
        for x, t in batches
    )
    return loss, {name: slot.array for name, slot in slots.items()}


def assert_same(mine, truth, tolerance):
    assert mine.keys() == truth.keys()
    for name in truth:
        assert np.abs(mine[name] - truth[name]).max() <= tolerance * np.abs(truth[name]).max(), name


@pytest.mark.parametrize("tied", [False, True])
def test_micro_batches_add_up_to_the_whole_batch(tied):
    x, t = sequences(7)
    loss, whole = gradients_of(host, [(x, t)], tied)
    parts = [(x[:1], t[:1]), (x[1:4], t[1:4]), (x[4:], t[4:])]
    loss_of_parts, summed = gradients_of(host, parts, tied)
    assert loss_of_parts == pytest.approx(loss, rel=1e-12)
    assert_same(summed, whole, 1e-11)


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_is_the_same_on_the_reference_body(tied):
    loss, truth = gradients_of(reference, [sequences(3)], tied)
    mine, gradients = gradients_of(host, [sequences(3)], tied)
    assert mine == pytest.approx(loss, rel=1e-12)
    assert_same(gradients, truth, 1e-11)


def test_nothing_is_allocated_after_the_first_step():
    units, arena = gpt(Plain(host), **SMALL), Arena()
    weights, gradients, _, slots = place(units, 1, np.float32)
    x, t = sequences(4)
    after = []
    for _ in range(3):
        for slot in slots.values():
            slot.filled = False
        for micro in (slice(0, 2), slice(2, 4)):
            run(
                units,
                weights,
                gradients,
                x[micro],
                loss_against(host, t[micro], 1 / t.size, arena),
                arena,
            )
            assert arena.live == 0
        after.append((arena.allocations, arena.peak))
    assert after[0] == after[1] == after[2]
    assert arena.peak > 0


class Hoarder:
    """A layer whose saved state is a buffer, and which notes how much is leased when its backward half begins."""

    output_is_free = False

    def __init__(self, notes):
        self.notes = notes

    def parameters(self):
        return []

    def forward(self, w, x, arena):
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
    y, saved = chain.forward({}, np.zeros(1), arena)
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


@pytest.mark.parametrize("ops", [reference, host])
@pytest.mark.parametrize("law", laws_of(LayerLaws))
def test_layers_obey(law, ops):
    getattr(LayerLaws(), law)(Plain(ops), HostBackend())


def layers_with_inputs():
    plain, draw = Plain(host), lambda generator, shape: generator.standard_normal(shape)
    x = np.random.default_rng(0).standard_normal((2, 5, 6))
    yield "linear", plain.linear(6, 4, draw), x
    yield "gelu", plain.column_linear(6, 4, draw, activation="gelu"), x
    yield "relu", plain.linear(6, 4, draw, activation="relu"), x
    yield "norm", plain.norm(6), x
    yield "attention", plain.attention(2, 1), x
    for unit in gpt(plain, **SMALL):
        kind = unit.name.split(".")[-1]
        inputs = np.random.default_rng(1).standard_normal((2, 9, SMALL["width"]))
        yield unit.name, unit.layer, sequences(2)[0] if kind == "embedding" else inputs


@pytest.mark.parametrize(
    ("name", "layer", "x"), [pytest.param(*case, id=case[0]) for case in layers_with_inputs()]
)
def test_a_layer_never_writes_to_x_or_dy_or_its_weights(name, layer, x):
    weights, gradients, arrays, _ = place([Unit(name, layer)], 1, np.float64)
    x.flags.writeable = False
    for array in arrays.values():
        array.flags.writeable = False
    arena = Arena()
    y, saved = layer.forward(weights[name], x, arena)
    dy = np.random.default_rng(2).standard_normal(y.shape)
    dy.flags.writeable = False
    dx, pending = layer.backward_input(weights[name], dy, saved, arena)
    if dx is not None:
        assert np.isfinite(dx).all()
    layer.backward_weight(pending, gradients[name], arena)
    for parameter in layer.parameters():
        leaf = gradients[name]
        for step in parameter.name.split("."):
            leaf = leaf[step]
        assert leaf.filled
        assert np.isfinite(leaf.array).all()


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


def test_an_mlp_learns_a_rule_that_is_not_linear():
    units, arena = mlp(Plain(host), features=2, hidden=(16,), classes=2), Arena()
    weights, gradients, arrays, slots = place(units, 1, np.float64)
    x = np.random.default_rng(0).standard_normal((200, 2))
    t = (x[:, 0] * x[:, 1] > 0).astype(int)
    for _ in range(400):
        for slot in slots.values():
            slot.filled = False
        run(units, weights, gradients, x, loss_against(host, t, 1 / 200, arena), arena)
        for name, array in arrays.items():
            host.sgd(array.reshape(-1), slots[name].array.reshape(-1), 1.0, 0.3, 0.0, arena)
    logits = x
    for unit in units:
        logits, _ = unit.layer.forward(weights[unit.name], logits, arena)
    assert host.count_correct(logits, t, arena) >= 190


def test_heads_must_divide_the_width_and_the_nearest_are_named():
    with pytest.raises(
        ConfigError, match=r"5 heads do not divide a width of 12\.(.|\n)*Nearest that does: 4"
    ):
        gpt(Plain(host), **{**SMALL, "heads": 5})


def test_a_layer_norm_adds_its_own_epsilon_to_the_variance():
    x, w = np.float64([[1, -1]]), {"gain": np.ones(2), "bias": np.zeros(2)}
    for epsilon in (3.0, 0.5625):
        y, _ = Norm(host, 2, epsilon).forward(w, x, Arena())
        np.testing.assert_allclose(y, x / (1 + epsilon) ** 0.5, rtol=1e-15)
