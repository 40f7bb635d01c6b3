"""Dropout: Philox's own bits, right rates, gradients, and masks that no two layers, steps or rows share."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.layers.base import READING, Now
from mpitrain.layers.dropout import Dropped
from mpitrain.layers.plain import Plain
from mpitrain.machine.backend import Arena
from mpitrain.ops.device import host_ops, ops_for
from mpitrain.ops.random_bits import LEVELS, RandomBits, scale, threshold
from mpitrain.ops.reference.layers import random_bits

HOST = host_ops()
KEY = (7, 3)


def mask(shape, key=KEY, step=0, first=0, columns=0, rate=0.1):
    y = HOST.dropout(np.ones(shape), key, step, first, columns or shape[1], rate, Arena())
    assert set(np.unique(y)) <= {0, scale(rate)}
    return y != 0


def test_the_bits_are_those_of_numpy_s_philox_from_any_number_on():
    whole = np.random.Philox(counter=[0, 9, 0, 0], key=np.uint64(KEY)).random_raw(300)
    truth = whole.view(np.uint16)
    np.testing.assert_array_equal(random_bits(KEY, 9, np.arange(1200)), truth)
    bits = RandomBits(KEY, 9)
    for first, count in ((0, 1200), (1, 1), (17, 100), (16, 0), (0, 5)):
        np.testing.assert_array_equal(bits.run(first, count), truth[first : first + count])
    far = np.array([2**62, 2**62 + 40])
    assert list(random_bits(KEY, 9, far)) == [bits.run(int(n), 1)[0] for n in far]


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_the_rate_is_within_five_deviations_and_the_mean_stays(rate):
    n, p = 2_000_000, threshold(rate) / LEVELS
    found = 1 - mask((2000, 1000), rate=rate).mean()
    assert abs(p - rate) <= 0.5 / LEVELS
    assert abs(found - p) <= 5 * (p * (1 - p) / n) ** 0.5
    assert (1 - p) * scale(rate) == pytest.approx(1, abs=1e-12)


def test_columns_and_rows_of_the_whole_are_drawn_alone():
    whole = mask((40, 48))
    np.testing.assert_array_equal(mask((9, 48), first=11 * 48), whole[11:20])
    np.testing.assert_array_equal(mask((9, 16), first=11 * 48 + 32, columns=48), whole[11:20, 32:])


def test_layers_steps_rows_columns_and_seeds_never_share_a_mask():
    rows = mask((64, 4096), rate=0.5)
    others = [
        mask((1, 4096), key, step, rate=0.5)[0]
        for key, step in (((8, 3), 0), ((7, 4), 0), (KEY, 1), ((3, 7), 0), ((0, 0), 3))
    ]
    every = np.array([*rows, *others]) * 2.0 - 1
    correlation = every @ every.T / every.shape[1]
    assert np.abs(correlation - np.eye(len(every))).max() <= 5 / 64
    columns = every.T[:64] @ every.T[:64].T / len(every)
    assert np.abs(columns - np.eye(64)).max() < 0.8


def test_layers_of_a_factory_have_their_own_numbers():
    plain, now = Plain(ops_for("cpu")), Now(0, 0, 1, True)
    one, two = (
        plain.dropout(0.5).forward({}, np.ones((1, 512)), now, Arena())[0] for _ in range(2)
    )
    assert (one != two).any()


def test_a_layer_has_the_gradient_of_its_output_with_the_mask_fixed():
    plain, now = Plain(ops_for("cpu")), Now(4, 6, 2, True)
    layer, arena = plain.dropout(0.3), Arena()
    x, dy = np.random.default_rng(0).standard_normal((2, 2, 5, 8))
    y, saved = layer.forward({}, x, now, arena)
    dx, _ = layer.backward_input({}, dy, saved, arena)
    direction = np.random.default_rng(1).standard_normal(x.shape)
    ends = [layer.forward({}, x + h * direction, now, arena)[0] for h in (1e-5, -1e-5)]
    numeric = np.vdot(dy, ends[0] - ends[1]) / 2e-5
    assert abs(np.vdot(dx, direction) - numeric) <= 1e-8
    assert (y == 0).any() and saved is now


def test_an_evaluation_has_no_dropout_and_a_rate_of_0_no_layer():
    plain = Plain(ops_for("cpu"))
    inner = plain.linear(8, 8, lambda generator, shape: generator.normal(size=shape))
    layer, x = plain.dropped(inner, 0.5), np.ones((3, 8))
    w = {"weight": np.eye(8), "bias": np.zeros(8)}
    assert isinstance(layer, Dropped)
    np.testing.assert_array_equal(layer.forward(w, x, READING, Arena())[0], x)
    np.testing.assert_array_equal(layer.forward(w, x, READING, Arena(), x)[0], 2 * x)
    assert plain.dropout(0.5).forward({}, x, READING, Arena())[0] is x
    assert plain.dropped(inner, 0.0) is inner


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, float("nan")])
def test_a_rate_outside_0_to_1_is_refused(rate):
    with pytest.raises(ConfigError, match=f"this one is {rate}"):
        Plain(ops_for("cpu")).dropout(rate)
