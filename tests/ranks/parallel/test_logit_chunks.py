"""Logits by chunks: losses and gradients of the plain run to rounding, and no array of all logits."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.machine.backend import Arena
from mpitrain.run.build import build
from mpitrain.run.inference import reader as reader_of
from mpitrain.transport.threads import run_ranks
from tests.ranks.parallel.test_recompute import FOUR, OWN_ROWS, sent
from tests.ranks.parallel.test_tensor import GPT, source_of
from tests.training import configured

SGD = [*GPT, "optimizer.name=sgd", "optimizer.weight_decay=0"]
LAYOUTS = {
    "one rank": (1, ["batch.micro_batches=2"]),
    "tied": (1, ["model.tied=true"]),
    "tp, tied": (2, ["layout.tp=2", "model.tied=true"]),
    "own rows": (2, OWN_ROWS),
    "zero-bubble": (2, [*FOUR, "pipeline.schedule=zero-bubble"]),
    "gpipe, tied, zero 2": (
        4,
        [*FOUR, "layout.dp=2", "replication.zero=2", "pipeline.schedule=gpipe", "model.tied=true"],
    ),
    "async": (2, [*FOUR, "pipeline.schedule=async", "run.steps=2"]),
}


def curve(transport, config):
    """Losses and norms of two steps and of an evaluation, the last gradient, and logits."""
    source = source_of(config)
    trainer = build(transport, config, source=source).trainer
    told = []
    for step in range(2):
        outcome = trainer.step(step, *trainer.replica.batch(source, step))
        told += [outcome.loss, outcome.grad_norm]
    gradients = trainer.gradients.copy()
    assert trainer.arena.live == 0
    reader = reader_of(trainer, 1, 8)
    own = reader.read([source.held_out_rows([0])[0][0, :4].tolist()], 8)
    own = [] if own is None else own
    every = trainer.logits(source.held_out_rows([0])[0][:, :7])
    whole = [] if every is None else every
    numbers = np.array([*told, *trainer.evaluate(source)])
    return numbers, gradients, np.array(own), np.array(whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_gradients_and_evaluations_are_equal_to_rounding(layout):
    ranks, settings = LAYOUTS[layout]
    plain = run_ranks(ranks, curve, configured(*SGD, *settings))
    for chunks in (7, 10_000):
        config = configured(*SGD, *settings, f"memory.logit_chunks={chunks}")
        for truth, found in zip(plain, run_ranks(ranks, curve, config), strict=True):
            for own, other in zip(truth, found, strict=True):
                same = np.isnan(own) & np.isnan(other)  # an asynchronous step has no norm of all
                assert np.all(same | (np.abs(other - own) <= 1e-12 * (1 + np.abs(own)))), chunks


@pytest.mark.parametrize("tied", ["true", "false"])
def test_no_array_has_a_logit_of_every_row_in_training_and_evaluation(tied, monkeypatch):
    largest, take = [], Arena.take

    def noted(arena, shape, dtype):
        if np.dtype(dtype) != np.uint8:  # The count before the start leases bytes.
            largest.append(int(np.prod(shape)))
        return take(arena, shape, dtype)

    monkeypatch.setattr(Arena, "take", noted)

    def most(chunks):
        largest.clear()
        wide = [
            "model.layers=1",
            "data.vocabulary=4001",
            f"model.tied={tied}",
            f"memory.logit_chunks={chunks}",
        ]
        run_ranks(1, curve, configured(*SGD, *wide))
        return max(largest)

    rows = 12 * 24
    assert most(1) == rows * 4001 and most(8) <= max(rows // 8 * 4001, 4001 * 48)


def test_the_head_s_gradient_is_reduced_once_and_the_loss_of_each_row_once():
    base = [*SGD, "layout.tp=2", "layout.algorithm=ring", "replication.algorithm=ring"]
    plain, cut = (
        run_ranks(2, sent, configured(*base, f"memory.logit_chunks={chunks}")) for chunks in (1, 4)
    )
    assert sum(plain) == sum(cut)


def test_rank_0_needs_all_logits_in_mode_master():
    with pytest.raises(ConfigError, match="mode master"):
        configured("replication.mode=master", "memory.logit_chunks=2")
