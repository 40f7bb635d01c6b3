"""The seam between the training step and how replicas are kept in step: a mode made here, stricter than any there is."""

from itertools import islice

import numpy as np
import pytest

from mpitrain.parallel.modes import MODES
from mpitrain.parallel.replica import Replica, whole
from mpitrain.run.build import build
from mpitrain.transport.threads import run_ranks
from tests.generation import tokens
from tests.rows import replaced
from tests.training import TINY, configured, near

pytestmark = pytest.mark.slow


def used(replica, unit):
    """The entries of the tensors of a unit, tied ones included."""
    unit = replica.storage.units[unit]
    names = {unit.tied.get(p.name, f"{unit.name}.{p.name}") for p in unit.layer.parameters()}
    return [entry for entry in replica.storage.entries if entry.name in names]


def leaves_of(tree):
    for node in tree.values():
        yield from leaves_of(node) if isinstance(node, dict) else [node]


class Strict(Replica):
    """Parameters are there from `open` to the next `open` or `poll`, gradients until they are ready: at
    any other time all is NaN.
    """

    def build(self, optimizer):
        super().build(optimizer)
        self.shown = np.full(self.storage.length, np.nan, self.storage.dtype)
        self.views = self.storage.weights(self.shown)
        self.slot = self.shown.copy()
        self.total_of_gradients = self.grid.copies.bind(self.gradient_buffer)
        self.slots, _ = self.storage.gradients(self.slot)

    def cut(self, firsts=()):
        return ()

    def counted(self):
        return whole(self.storage) if self.grid.world.rank == 0 else ()

    def open(self, unit, micro):
        self.poll()
        for entry in used(self, unit):
            entry.view(self.shown)[...] = entry.view(self.parameters)
        return self.views[unit]

    def poll(self):
        self.shown.fill(np.nan)

    def begin(self, step, *rest):
        super().begin(step, *rest)
        self.gradient_buffer.fill(0)

    def gradients(self, unit):
        for leaf in leaves_of(self.slots[unit]):
            leaf.filled = False
        return self.slots[unit]

    def ready(self, unit, is_last):
        assert all(leaf.filled for leaf in leaves_of(self.slots[unit]))
        for entry in used(self, unit):
            entry.view(self.gradient_buffer)[...] += entry.view(self.slot)
        self.slot.fill(np.nan)

    def wait(self):
        self.total_of_gradients.run()


def everything(transport, settings):
    """What training, evaluation, logits and text say of a run of six steps."""
    trainer, source, _ = build(transport, configured(*TINY, "precision.compute=float64", *settings))
    outcomes = [trainer.step(index, *trainer.replica.batch(source, index)) for index in range(6)]
    assert trainer.arena.live == 0
    return (
        np.array([(o.loss, o.grad_norm) for o in outcomes]),
        np.array(trainer.evaluate(source)),
        trainer.logits(source.held_out_rows([0, 1])[0]).copy(),
        trainer.tensors()["embedding.tokens"].ravel()[:64],
        np.array(list(islice(tokens(trainer, [65], 0.8, 40, 0), 8))),
    )


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["model.tied=true", "batch.micro_batches=2"],
        ["model.tied=true", "batch.micro_batches=3", "pipeline.schedule=zero-bubble"],
    ],
)
def test_every_mode_uses_parameters_only_between_open_and_poll(settings):
    (alone,) = run_ranks(1, everything, settings)
    with replaced(MODES, "all-reduce", Strict):
        for ranks in (1, 3):
            assert all(near(alone, found) for found in run_ranks(ranks, everything, settings)), (
                ranks
            )
