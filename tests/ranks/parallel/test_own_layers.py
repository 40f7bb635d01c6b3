"""Layers that a user writes train in any layout as on one rank: random numbers by row, outputs of several widths."""

from functools import partial

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.layers.base import Now
from mpitrain.layers.plain import Plain
from mpitrain.ops.device import ops_for
from mpitrain.run.trainer import Trainer
from mpitrain.transport.threads import run_ranks
from tests.cases.own_layers import units
from tests.training import configured, trained

MODEL = {"vocab": 11, "context": 6, "width": 24, "heads": 6, "kv_heads": 3, "depth": 2}
STEPS, ROWS, HELD_OUT = 3, 7, 5
BASE = [
    "model.context=6",
    "model.width=24",
    "model.heads=6",
    f"batch.size={ROWS}",
    f"run.steps={STEPS}",
    "precision.compute=float64",
    "optimizer.warmup=0",
    "optimizer.lr=0.01",
    "run.eval_rows=5",
]


class Tokens:
    """Rows of random tokens, the same in every layout."""

    held_out = HELD_OUT

    def batch(self, seed, step, size, rows, before=None):
        drawn = np.random.default_rng([3, step]).integers(11, size=(size, MODEL["context"] + 1))
        return drawn[rows.start : rows.stop, :-1], drawn[rows.start : rows.stop, 1:]

    def held_out_rows(self, rows):
        found = np.random.default_rng(9).integers(11, size=(HELD_OUT, MODEL["context"] + 1))
        return found[list(rows), :-1], found[list(rows), 1:]


def on(ranks, drops, settings):
    model = partial(units, drops=drops, **MODEL)
    return run_ranks(ranks, trained, configured(*BASE, *settings), STEPS, Tokens(), model)


LAYOUTS = {
    "micro-batches": (1, ["batch.micro_batches=3"]),
    "rows divided": (3, ["layout.tp=3", "layout.sequence_parallel=true"]),
    "interleaved halves": (
        2,
        ["layout.pp=2", "batch.micro_batches=3", "pipeline.schedule=zero-bubble"],
    ),
}


@pytest.mark.parametrize("name", ["async", "async-2bw"])
def test_backward_sees_the_rows_of_its_forward_while_steps_overlap(name):
    settings = [f"pipeline.schedule={name}", "layout.pp=2", "batch.micro_batches=3"]
    first, second = on(2, True, settings)
    assert np.isfinite(first[0][1:]).all()  # the loss of a step is known one step later
    assert np.array_equal(first[0], second[0], equal_nan=True)


def test_ranks_that_do_not_divide_the_shared_heads_are_refused():
    def make(transport):
        Trainer(
            transport,
            partial(units, drops=False, **{**MODEL, "kv_heads": 2, "heads": 6}),
            configured(*BASE, "layout.tp=3"),
        )

    with pytest.raises(ConfigError, match="share the heads"):
        run_ranks(3, make)


@pytest.mark.parametrize("made", [[], None, ["words"], lambda layers: None, lambda layers: []])
def test_a_model_without_units_is_refused(made):
    def make(transport):
        with pytest.raises(ConfigError, match="list of units") as refused:
            Trainer(transport, made, configured(*BASE))
        assert refused.value.agreed

    run_ranks(2, make)


def test_as_many_shared_heads_as_heads_are_the_layer_without_them():
    plain = Plain(ops_for("cpu"))
    draw = np.random.default_rng(0).standard_normal
    assert plain.qkv(12, 3, draw, 3).parameters() == plain.qkv(12, 3, draw).parameters()
    assert plain.qkv(12, 3, draw).parameters()[0].shape == (36, 12)


@pytest.mark.parametrize(
    ("make", "law"),
    [
        (lambda plain: plain.qkv(12, 6, None, 4), "4 key and value heads do not divide 6"),
        (lambda plain: plain.qkv(12, 6, None, 0), "0 key and value heads"),
        (lambda plain: plain.attention(12, 6, 4), "4 key and value heads do not divide 6"),
    ],
)
def test_shared_heads_that_cannot_be_are_refused(make, law):
    with pytest.raises(ConfigError, match=law):
        make(Plain(ops_for("cpu")))


def test_rows_of_an_activation_have_their_numbers_in_the_global_batch():
    assert Now(4, 10, 2, True).numbers(6) == range(30, 36)


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_numbers_of_a_recomputed_layer_are_those_of_its_forward(name):
    ranks, settings = LAYOUTS[name]
    plain = on(ranks, True, settings)
    for mode in ("attention", "unit", "2", "3"):
        found = on(ranks, True, [*settings, f"memory.recompute={mode}"])
        for (truth, whole, _), (losses, tensors, _) in zip(plain, found, strict=True):
            assert np.array_equal(truth, losses), mode
            assert all(np.array_equal(whole[key][1], tensors[key][1]) for key in whole), mode
