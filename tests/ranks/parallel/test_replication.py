"""The seam between the training step and how replicas are kept in step: a mode made here, stricter than any there is."""

import math
from itertools import islice

import numpy as np
import pytest

from mpitrain.optim import Optimizer
from mpitrain.parallel.modes import MODES
from mpitrain.parallel.replication.protocol import Replication
from mpitrain.parallel.replication.records import StepResult
from mpitrain.parallel.replication.step_end import AgreeAndUpdate
from mpitrain.parallel.replication.whole import LocalGradients, ReplicaRows, WholeParameters, whole
from mpitrain.regions import Piece
from mpitrain.run.build import build
from mpitrain.run.generate import tokens
from mpitrain.transport.threads import run_ranks
from tests.rows import replaced
from tests.training import TINY, configured

pytestmark = pytest.mark.slow


class Slots(Replication):
    """Parameters are there between open and close alone, gradients until they are ready: anywhere else all is NaN."""

    def __init__(self, replica):
        owned = whole(replica.storage)
        store, reducer = WholeParameters(replica, owned), LocalGradients(replica, owned, owned)
        step_end = AgreeAndUpdate(replica, store, reducer)
        super().__init__(replica, step_end, ReplicaRows(replica))
        storage = replica.storage
        self.shown, self.slot = (np.full(storage.length, np.nan, storage.dtype) for _ in range(2))
        self.views, (self.leaves, _) = storage.weights(self.shown), storage.gradients(self.slot)
        self.used = [
            {unit.tied.get(p.name, f"{unit.name}.{p.name}") for p in unit.layer.parameters()}
            for unit in storage.units
        ]
        self.optimizer = Optimizer(
            replica.config.optimizer,
            storage,
            [Piece(0, storage.length, 0)],
            replica.device.ops,
            replica.device.backend,
            replica.arena,
        )
        self.control = np.zeros(4)
        self.agree, self.sum = (
            replica.grid.world.bind(self.control),
            replica.grid.dp.bind(self.gradient_buffer),
        )
        self.now_open = None

    def entries(self, unit):
        return [entry for entry in self.replica.storage.entries if entry.name in self.used[unit]]

    def begin(self, step):
        self.gradient_buffer[:] = 0

    def open(self, unit, part):
        assert self.now_open is None, "one unit is open at a time"
        self.now_open = unit, part
        for entry in self.entries(unit):
            entry.view(self.shown)[...] = entry.view(self.parameters)
        return self.views[unit]

    def close(self, unit, part):
        assert self.now_open == (unit, part)
        self.now_open = None
        self.shown[:] = np.nan

    def flat_leaves(self, tree):
        for node in tree.values():
            yield from self.flat_leaves(node) if isinstance(node, dict) else [node]

    def gradients(self, unit, part):
        for leaf in self.flat_leaves(self.leaves[unit]):
            leaf.filled = False
        return self.leaves[unit]

    def gradient_ready(self, unit, is_last):
        assert all(leaf.filled for leaf in self.flat_leaves(self.leaves[unit]))
        for entry in self.entries(unit):
            entry.view(self.gradient_buffer)[...] += entry.view(self.slot)
        self.slot[:] = np.nan

    def total(self, *numbers):
        self.control[:] = numbers
        self.agree.run()
        return self.control.tolist()

    def finish(self, mine):
        self.sum.run()
        rank = self.replica.grid.world.rank
        squares = float((self.gradient_buffer**2).sum()) if rank == 0 else 0.0
        loss, squares, _, stop = self.total(mine.loss, squares, 0, mine.stop)
        norm, clip = math.sqrt(squares), self.replica.config.optimizer.clip
        (piece,) = self.optimizer.pieces
        self.optimizer.update(
            piece,
            self.parameters,
            self.gradient_buffer,
            min(1.0, clip / norm),
            mine.lr,
            mine.number,
        )
        return StepResult(loss, norm, 0, mine.lr, True, stop > 0)


def everything(transport, settings):
    """What training, evaluation, logits and text say of a run of six steps."""
    trainer, source, _ = build(
        transport, configured(*TINY, "precision.compute=float64", "run.eval_rows=20", *settings)
    )
    outcomes = [
        trainer.step(index, *trainer.replication.batch(source, index)) for index in range(6)
    ]
    assert trainer.arena.live == 0
    return (
        np.array([(o.loss, o.grad_norm) for o in outcomes]),
        np.array(trainer.evaluate(source)),
        trainer.logits(source.held_out_rows([0, 1])[0]).copy(),
        trainer.tensors()["embedding.tokens"].ravel()[:64],
        np.array(list(islice(tokens(trainer, [65], 0.8, 40, 0), 8))),
    )


@pytest.mark.parametrize("settings", [[], ["model.tied=true", "batch.micro_batches=2"]])
def test_every_mode_uses_parameters_only_between_open_and_close(
    settings,
):
    (alone,) = run_ranks(1, everything, settings)
    with replaced(MODES, "all-reduce", MODES["all-reduce"]._replace(make=Slots)):
        for ranks in (1, 3):
            for found in run_ranks(ranks, everything, settings):
                for one, other in zip(alone, found, strict=True):
                    assert np.all(np.abs(one - other) <= 1e-9 + 1e-9 * np.abs(one)), ranks
