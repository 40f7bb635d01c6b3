"""Stages: how often a step reads the device, which halves of a layer run, and what is held meanwhile."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.layers.base import READING, Unit, backward, normal
from mpitrain.layers.plain import Plain, Residual, Sequential
from mpitrain.machine.backend import Arena
from mpitrain.models.gpt import gpt
from mpitrain.ops.device import host_ops
from mpitrain.pipeline.pipeline import Stage
from mpitrain.run.trainer import Trainer
from mpitrain.transport.threads import run_ranks
from tests.training import configured
from tests.unit.placing import place

host = host_ops()

MICRO_BATCHES = 3
SMALL = [
    "model.context=16",
    "batch.size=8",
    f"batch.micro_batches={MICRO_BATCHES}",
    "optimizer.clip=0",
]
GPT = {"vocab": 11, "context": 16, "width": 12, "heads": 3, "depth": 2}
TOKENS = np.random.default_rng(0).integers(11, size=(8, 17))
BATCH = TOKENS[:, :-1], TOKENS[:, 1:]


class Later:
    """A number that the device has not computed yet: it may be copied there, and no float can be made of it."""

    def __init__(self, value):
        self.value = np.array(value)

    def __array__(self, dtype=None, copy=None):
        return self.value


class HalfLoss:
    """Half the cross-entropy, summed where nobody waits for it."""

    correct = staticmethod(host.count_correct)

    def gradient(self, logits, targets, scale, arena):
        value, gradient = host.cross_entropy(logits, targets, scale / 2, arena)
        return Later(value / 2), gradient

    def value(self, logits, targets, arena):
        return host.cross_entropy_loss(logits, targets, arena) / 2


class Held:
    """A source whose held-out rows are the batch."""

    held_out = len(TOKENS)

    def held_out_rows(self, rows):
        return tuple(chunk[list(rows)] for chunk in BATCH)


def test_the_loss_is_handed_in_and_read_from_the_device_once_a_step():
    def run(transport, loss):
        units = gpt(Plain(host), **GPT, tied=True)
        trainer, reads = Trainer(transport, units, configured(*SMALL), loss), []
        evaluated, accuracy = trainer.evaluate(Held())
        assert 0 <= accuracy <= 1
        to_host = trainer.backend.to_host
        trainer.backend.to_host = lambda array: (reads.append(array.shape), to_host(array))[1]
        outcome = trainer.step(0, *BATCH)
        assert reads == [(MICRO_BATCHES + 2,)], (
            "the losses, the squares of the gradients, and how many are not finite"
        )
        return np.array([evaluated, outcome.loss, outcome.grad_norm])

    (whole,), (half,) = run_ranks(1, run, None), run_ranks(1, run, HalfLoss())
    assert np.all(np.abs(whole - 2 * half) <= 1e-6 * whole) and abs(whole[0] / whole[1] - 1) <= 1e-6


class AtOnce:
    """A linear layer with both halves in one; notes which way it went."""

    output_is_free = True

    def __init__(self, way):
        self.way, self.inner = way, Plain(host).linear(6, 6, normal(1.0))
        self.parameters, self.forward = self.inner.parameters, self.inner.forward
        self.output_shape = self.inner.output_shape

    def backward_input(self, w, dy, saved, arena):
        self.way.append("input")
        return self.inner.backward_input(w, dy, saved, arena)

    def backward_weight(self, pending, dw, arena):
        self.way.append("weight")
        self.inner.backward_weight(pending, dw, arena)

    def backward(self, w, dy, saved, dw, arena):
        self.way.append("both")
        return backward(self.inner, w, dy, saved, dw, arena)


def test_a_layers_fused_backward_is_used_at_any_depth():
    def run(transport):
        way = []
        units = [
            Unit("first", Residual(Sequential(a=Plain(host).norm(6), b=AtOnce(way)))),
            Unit("second", AtOnce(way)),
        ]
        trainer = Trainer(transport, units, configured(*SMALL))
        stage = Stage(units, trainer.replica, trainer.arena)
        x, dy = np.random.default_rng(0).standard_normal((2, 5, 6)).astype(np.float32)
        found = []
        for backwards in (
            lambda: stage.backward(0, dy),
            lambda: (stage.backward_input(0, dy), stage.backward_weight(0))[0],
        ):
            trainer.replica.begin(0)
            stage.left = 1
            stage.forward(0, READING._replace(trains=True), x)
            dx = backwards().copy()
            trainer.replica.wait()
            found.append((dx, trainer.gradients.copy()))
        return way, *found

    ((way, fused, halves),) = run_ranks(1, run)
    assert way == ["both", "both", "input", "input", "weight", "weight"]
    for one, other in zip(fused, halves, strict=True):
        assert np.abs(one).max() > 0 and np.array_equal(one, other)


def in_halves(layer, w, dy, saved, dw, arena):
    dx, pending = layer.backward_input(w, dy, saved, arena)
    layer.backward_weight(pending, dw, arena)
    return dx


@pytest.mark.parametrize("vocab", (11, 700))  # the most is held in a block, or at the head
def test_a_step_holds_the_bytes_of_a_plain_loop_over_units(vocab):
    model = {**GPT, "vocab": vocab}
    units = gpt(Plain(host), **model)
    weights, gradients, _, _ = place(units, 0, np.float32)

    def by_hand(way, x, targets):
        """The peak of one step; nothing is named that is not needed."""
        saved, arena = [], Arena()
        for unit in units:
            x, kept = unit.layer.forward(weights[unit.name], x, READING, arena)
            saved.append(kept)
        _, dy = host.cross_entropy(x.reshape(len(targets), -1), targets, 1.0, arena)
        dy = dy.reshape(x.shape)
        del x, kept
        for unit in reversed(units):
            dy = way(unit.layer, weights[unit.name], dy, saved.pop(), gradients[unit.name], arena)
        return arena.peak

    def run(transport):
        trainer = Trainer(
            transport, gpt(Plain(host), **model), configured(*SMALL, "batch.micro_batches=1")
        )
        counts = []
        for index in range(3):
            trainer.step(index, *BATCH)
            counts.append((trainer.arena.allocations, trainer.arena.live))
        assert len(set(counts)) == 1 and counts[0][1] == 0, counts
        return trainer.arena.peak

    (peak,) = run_ranks(1, run)
    assert (
        peak
        == by_hand(backward, BATCH[0], BATCH[1].reshape(-1))
        <= by_hand(in_halves, BATCH[0], BATCH[1].reshape(-1))
    )


class Forgetful:
    """A layer that saves nothing; it notes whether the input of the first one is still alive."""

    def __init__(self, alive):
        self.alive = alive

    def parameters(self):
        return []

    def output_shape(self, shape):
        return shape

    def forward(self, w, x, now, arena):
        if not self.alive:
            self.alive.append(weakref.ref(x))
        else:
            self.alive.append(self.alive[0]() is not None)
        return x + 1, None


@pytest.mark.parametrize("trains", (True, False))
def test_a_stage_frees_an_input_that_no_layer_saves(trains):
    alive = []
    idle = SimpleNamespace(open=lambda unit, micro: {})
    layers = [Unit(str(number), Forgetful(alive)) for number in range(2)]
    stage = Stage(layers, idle, Arena())
    stage.forward(0, READING._replace(trains=trains), np.zeros(3))
    assert alive[1] is False
