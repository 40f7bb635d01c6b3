"""A mixture of experts: who takes which token, and what the loss gets. It is the block of Mixtral in tests/huggingface."""

import numpy as np
import pytest

from mpitrain.config import Model
from mpitrain.layers.base import Now
from mpitrain.layers.plain import Plain
from mpitrain.machine.backend import Arena, HostBackend
from mpitrain.ops.device import host_ops
from mpitrain.ops.reference.experts import count_choices, permute
from tests.laws.layers import draw, placed


def layer_of(width=6, hidden=5, **keys):
    plain = Plain(host_ops(), Model(experts=4, **keys))
    return plain.experts(width, hidden, draw, draw, is_gated=True)


def forward_and_back(layer, x, dy, weight=1 / 14):
    """y, dx, {name: gradient} of a layer with weights of a fixed seed, and its weights."""
    weights, gradients, arrays, slots = placed(layer, HostBackend())
    arena = Arena()
    y, saved = layer.forward(weights, x, Now(0, 0, 2, True, weight=weight), arena)
    dx, pending = layer.backward_input(weights, dy, saved, arena)
    layer.backward_weight(pending, gradients, arena)
    return y, dx, {name: slot.array for name, slot in slots.items()}, arrays


def test_each_expert_takes_its_tokens_in_order_and_the_first_of_a_sequence_up_to_its_capacity():
    chosen = np.array([[0, 2], [0, 1], [0, 3], [0, 2], [2, 0], [0, 1]])
    load = count_choices(chosen, 4, 2, 1, None)
    assert load.tolist() == [[[3, 1, 1, 1]], [[3, 1, 2, 0]]]
    for capacity, kept in ((1, 7), (2, 10), (9, 12)):
        places, sources, ends = permute(chosen, load, 0, 0, capacity, None)
        assert ends[-1] == kept
        expert = np.repeat(np.arange(4), np.diff(ends, prepend=0))
        for row, source in enumerate(sources[:kept]):
            assert chosen.flat[source] == expert[row] and places.flat[source] == row
        dropped = np.flatnonzero(places.reshape(-1) < 0)
        assert len(dropped) == 12 - kept and not sources[kept:].any()
    places = permute(chosen, load, 0, 0, 1, None)[0]
    assert places.reshape(-1).tolist().count(-1) == 5 and (places[[0, 3]] >= 0).all()
    nothing = np.zeros((0, 2), int)
    load = count_choices(nothing, 3, 0, 1, None)
    assert permute(nothing, load, 0, 0, 9, None)[2].tolist() == [0, 0, 0]


@pytest.mark.parametrize("router", ["after", "before"])
def test_the_terms_of_the_loss_have_the_gradient_of_their_definitions(router):
    """With no gradient of y, that of the router is of balance and z alone; finite differences of both."""
    x = np.random.default_rng(1).standard_normal((2, 7, 6))
    layer = layer_of(router=router, balance=0.3, z=0.05)
    counted = np.array([[1.0], [0.25]])
    _, dx, gradients, arrays = forward_and_back(layer, x, np.zeros_like(x), counted / 14)
    weight = arrays["layer.router.weight"]

    def terms(router_weight):
        logits = x @ router_weight.T
        exponentials = np.exp(logits)
        sums = exponentials.sum(-1, keepdims=True)
        # Which experts are chosen does not change within a small difference.
        chosen = np.argsort(-(x @ weight.T), -1)[..., :2]
        part = np.stack([np.bincount(c.reshape(-1), minlength=4) for c in chosen]) / 14
        balance = 4 * (part * (exponentials / sums).mean(1)).sum(-1) @ counted / 2
        return (0.3 * balance + 0.05 * (np.log(sums[..., 0]) ** 2).mean(1) @ counted / 2).item()

    for at in np.ndindex(weight.shape):
        step = np.zeros_like(weight)
        step[at] = 1e-5
        slope = (terms(weight + step) - terms(weight - step)) / 2e-5
        assert abs(gradients["layer.router.weight"][at] - slope) < 1e-8
    assert np.abs(dx).max() > 0
