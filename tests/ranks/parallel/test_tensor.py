"""Ranks that share layers, and replicas of such ranks, train as one rank does."""

from functools import partialmethod
from itertools import islice

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit, normal
from mpitrain.layers.plain import Linear, Plain
from mpitrain.models.classifiers import mlp
from mpitrain.ops.codes import WIRE_BLOCK as BLOCK
from mpitrain.ops.device import ops_for
from mpitrain.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mpitrain.run.build import build
from mpitrain.run.replicas import replicas_equal
from mpitrain.run.trainer import Trainer
from mpitrain.transport.native import native_all_reduce
from mpitrain.transport.threads import run_ranks
from tests.generation import tokens
from tests.training import assert_alike, configured, trained

pytestmark = pytest.mark.slow

STEPS = 4
RING = "layout.cp_mode=ring"
GPT = [
    "model.layers=2",
    "model.width=48",
    "model.heads=6",
    "model.context=24",
    "data.vocabulary=251",
    "batch.size=12",
    "optimizer.warmup=0",
    "optimizer.lr=0.01",
    "optimizer.clip=0.5",
    f"run.steps={STEPS}",
    "precision.compute=float64",
]


class Tokens:
    """Rows of tokens, or of numbers and a class each, that depend on the step alone."""

    def __init__(self, vocabulary, context):
        self.inputs = self.classes = vocabulary
        self.context, self.held_out = context, 9
        self.form, self.shape = "tokens", (context,)

    def batch(self, seed, step, size, rows, before=None):
        tokens = np.random.default_rng([seed, step]).integers(
            self.inputs, size=(size, self.context + 1)
        )
        mine = tokens[rows.start : rows.stop]
        return mine[:, :-1], mine[:, 1:]

    def held_out_rows(self, rows):
        tokens = np.random.default_rng(99).integers(
            self.inputs, size=(self.held_out, self.context + 1)
        )[list(rows)]
        return tokens[:, :-1], tokens[:, 1:]


class Points(Tokens):
    """Points of some dims, with a class each."""

    def __init__(self, dims):
        super().__init__(dims, 0)
        self.form, self.shape = "samples", (dims,)

    def batch(self, seed, step, size, rows, before=None):
        generator = np.random.default_rng([seed, step])
        points, classes = (
            generator.standard_normal((size, self.inputs)),
            generator.integers(self.classes, size=size),
        )
        return points[rows.start : rows.stop], classes[rows.start : rows.stop]

    def held_out_rows(self, rows):
        return self.batch(99, 0, self.held_out, range(self.held_out))


def source_of(config):
    if config.model.kind == "mlp":
        return Points(10)
    return Tokens(config.data.vocabulary, config.model.context)


def curve(transport, config, steps=STEPS):
    return trained(transport, config, steps, source_of(config))


ROUNDED = {"fp16": (2**-11, 2**-39), "int8": (0.0, 0.5 / 127)}
"""What a format rounds of an element: a part of it, and a part of the largest of its block (collectives/engine/arithmetic.py)."""


def rounded(transport, config, steps=STEPS):
    """Train in a lossy wire format: each step's sum of gradients is as near that of all replicas' own as the format allows.

    Each replica's part is coded once, and the sum once more, in blocks from the start of a bucket on. What all ranks that share
    layers hold is not coded.
    """
    source = source_of(config)
    trainer = build(transport, config, source=source).trainer
    buckets, dp, n = (trainer.replica.buckets, trainer.grid.copies.transport, trainer.grid.axes.dp)
    of_one, of_largest = ROUNDED[config.replication.wire]
    start, total = buckets._mover.start, np.empty(len(trainer.gradients))

    def noted(reduction):
        bucket = buckets.buckets[buckets._active.index(reduction)]
        total[bucket.start : bucket.stop] = trainer.gradients[bucket.start : bucket.stop]
        start(reduction)

    buckets._mover.start = noted
    for step in range(steps):
        total[:] = np.nan
        trainer.step(step, *trainer.replica.batch(source, step))
        sizes, limit = np.abs(total), np.zeros_like(total)
        for bucket in buckets.buckets:
            if not bucket.holders:
                part = sizes[bucket.start : bucket.stop]
                largest = np.repeat(np.maximum.reduceat(part, range(0, len(part), BLOCK)), BLOCK)[
                    : len(part)
                ]
                limit[bucket.start : bucket.stop] = of_one * part + of_largest * largest
        for each in (total, sizes, limit):
            native_all_reduce(dp, each)
        apart, single = np.abs(trainer.gradients - total), n * 2.0**-24 * sizes
        limit *= 2 + 2 * (
            of_one + of_largest
        )  # the sum is coded as well, and with it what was rounded before
        assert np.all(apart <= limit + single), (step, np.max(apart - limit - single))
        assert np.any(apart > single), "something is rounded"
    assert replicas_equal(trainer) and trainer.arena.live == 0


ONE = [*GPT, "model.layers=1"]
HALVES = [*ONE, "precision.compute=float32", "layout.tp=2"]


@pytest.mark.parametrize(
    "rate, causal, law", [(0.1, True, r"dropout 0\.1"), (0.0, False, "no causal mask")]
)
def test_a_ring_refuses_what_it_cannot_compute(rate, causal, law, monkeypatch):
    monkeypatch.setattr(Plain, "attention", partialmethod(Plain.attention, causal=causal))
    config = configured(*ONE, RING, "layout.cp=2", f"model.attention_dropout={rate}")
    with pytest.raises(ConfigError, match=rf"{law}(.|\n)*cp_mode to ulysses") as refused:
        run_ranks(2, curve, config)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("modes", [("ulysses", "ring"), ("ulysses",)], ids=["causal", "all seen"])
def test_rows_that_are_shorter_than_the_context_are_padded(modes, monkeypatch):
    """7 tokens on 3 ranks: the last rank has one, and two that do not count; a ring has 12."""
    if "ring" not in modes:
        monkeypatch.setattr(Plain, "attention", partialmethod(Plain.attention, causal=False))

    def told(transport, *layout):
        trainer = build(transport, configured(*ONE, *layout), source=Tokens(251, 24)).trainer
        tokens = np.random.default_rng(7).integers(251, size=(12, 8))
        rows = tokens[trainer.share().start : trainer.share().stop]
        steps = [trainer.step(step, rows[:, :-1], rows[:, 1:])[:2] for step in range(2)]
        return *np.ravel(steps), *np.ravel(trainer.logits(rows[:1, :-1]))[:40].tolist()

    (alone,) = run_ranks(1, told)
    for mode in modes:
        for found in run_ranks(3, told, "layout.cp=3", f"layout.cp_mode={mode}"):
            assert np.abs(np.subtract(found, alone)).max() <= 1e-9


@pytest.mark.parametrize(
    "dp, wire, own_rows",
    [(2, "fp16", "false"), (2, "int8", "true"), (3, "int8", "false"), (3, "fp16", "true")],
)
def test_tensor_parallel_replicas_round_as_their_wire_format(dp, wire, own_rows):
    settings = [f"layout.sequence_parallel={own_rows}", "replication.bucket_mb=0.01"]
    config = configured(*HALVES, *settings, f"replication.wire={wire}")
    run_ranks(2 * dp, rounded, config)


def test_replicated_tensors_have_equal_bits_on_any_hosts():
    """One group of replicas lies on hosts as aab, and the other as abb."""
    run_ranks(6, curve, configured(*HALVES, "replication.wire=int8"), 2, hosts="aaabbb")


def test_a_users_list_of_layers_gathers_and_splits():
    def units(layers):
        draw = normal(0.3)
        return [
            Unit("a", ColumnParallelLinear(layers, 10, 12, draw, "gelu", gather_output=True)),
            Unit("b", RowParallelLinear(layers, 12, 7, draw, "gelu", input_is_parallel=False)),
            Unit("c", ColumnParallelLinear(layers, 7, 24, draw, "relu")),
            Unit("d", RowParallelLinear(layers, 24, 6, draw, bias=False)),
            Unit("e", ColumnParallelLinear(layers, 6, 12, draw, bias=False, gather_output=True)),
        ]

    def plain(layers):
        return [
            Unit(name, Linear(layers.ops, *shape, normal(0.3), activation, bias))
            for name, shape, activation, bias in (
                ("a", (10, 12), "gelu", True),
                ("b", (12, 7), "gelu", True),
                ("c", (7, 24), "relu", True),
                ("d", (24, 6), None, False),
                ("e", (6, 12), None, False),
            )
        ]

    settings = ["model.kind=mlp", "model.width=12", "batch.size=9", "optimizer.lr=0.01"]
    settings += [f"run.steps={STEPS}", "optimizer.warmup=0", "precision.compute=float64"]
    (alone,) = run_ranks(1, trained, configured(*settings), STEPS, Points(10), plain)
    for dp, tp in ((1, 2), (2, 3)):
        config = configured(*settings, f"layout.tp={tp}")
        assert_alike(alone, run_ranks(dp * tp, trained, config, STEPS, Points(10), units))


@pytest.mark.parametrize(
    "own_rows, units, law",
    [
        (
            False,
            lambda layers: mlp(Plain(ops_for("cpu")), features=3, hidden=[4], classes=2),
            "weight of unit hidden.0 is neither",
        ),
        (
            False,
            lambda layers: [Unit("a", layers.column_linear(3, 4, normal(1), "relu"))],
            "but a needs that for its backward",
        ),
        (
            True,
            lambda layers: [Unit("a", layers.column_linear(3, 4, normal(1)))],
            "each rank its own rows, but no unit is one",
        ),
        (
            True,
            lambda layers: [
                Unit("a", ColumnParallelLinear(layers, 3, 4, normal(1), gather_output=True))
            ],
            "gather_output=True returns all columns",
        ),
        (
            True,
            lambda layers: [
                Unit("a", RowParallelLinear(layers, 4, 3, normal(1), input_is_parallel=False))
            ],
            "input_is_parallel=False takes all columns",
        ),
    ],
)
def test_units_that_cannot_be_trained_together_are_refused(own_rows, units, law):
    config = configured("layout.tp=2", f"layout.sequence_parallel={str(own_rows).lower()}")
    with pytest.raises(ConfigError) as refused:
        run_ranks(2, lambda transport: Trainer(transport, units, config))
    assert refused.value.agreed and law in refused.value.law


def test_a_vocabulary_smaller_than_its_group_is_refused():
    config = configured("layout.tp=4", "data.vocabulary=3", "model.context=8")
    with pytest.raises(
        ConfigError,
        match=r"4 ranks share a vocabulary, but it has 3 entries\.\nSet layout.tp to at most 3\.",
    ) as refused:
        run_ranks(4, lambda transport: build(transport, config, source=source_of(config)))
    assert refused.value.agreed


@pytest.mark.parametrize(
    "ranks, settings, law, ways, mended",
    [
        (
            2,
            ["layout.tp=2", "model.context=9", "batch.size=9", "batch.micro_batches=3"],
            "2 ranks divide the rows of each micro-batch, but one of 3 sequence(s) of 9 tokens has 27.",
            "Set batch.size to 6 or 12, model.context to 8 or 10, or layout.sequence_parallel to false.",
            [
                "batch.size=6",
                "batch.size=12",
                "model.context=8",
                "model.context=10",
                "layout.sequence_parallel=false",
            ],
        ),
        (
            4,
            ["layout.tp=2", "model.context=9", "batch.size=6"],
            "2 ranks divide the rows of each micro-batch, but one of 3 sequence(s) of 9 tokens has 27.",
            "Set batch.size to 4 or 8, model.context to 8 or 10, or",
            ["batch.size=4", "batch.size=8", "model.context=10"],
        ),
        (
            4,
            [
                "layout.tp=4",
                "model.heads=4",
                "model.context=6",
                "batch.size=12",
                "batch.micro_batches=4",
            ],
            "4 ranks divide the rows of each micro-batch, but one of 3 sequence(s) of 6 tokens has 18.",
            "Set batch.size to 8 or 16, model.context to 4 or 8, batch.micro_batches to 3, or",
            ["batch.size=8", "model.context=4", "batch.micro_batches=3"],
        ),
        (
            4,
            ["layout.tp=2", "layout.pp=2", "model.context=1", "batch.size=6"],
            "one of 3 sequence(s) of 1 tokens has 3.",
            "Set batch.size to 4 or 8, model.context to 2, or",
            ["batch.size=4", "batch.size=8", "model.context=2"],
        ),
    ],
)
def test_indivisible_rows_are_refused_with_the_nearest_numbers(ranks, settings, law, ways, mended):
    def built(transport, *more):
        config = configured(*ONE, "layout.sequence_parallel=true", *settings, *more)
        trainer, source, _ = build(transport, config, source=source_of(config))
        trainer.step(0, *trainer.replica.batch(source, 0))

    with pytest.raises(ConfigError) as refused:
        run_ranks(ranks, built)
    assert refused.value.agreed and law in refused.value.law and ways in refused.value.way_out, (
        refused.value
    )
    for setting in mended:
        run_ranks(ranks, built, setting)


def test_tensor_parallel_ranks_generate_the_text_of_one_rank():
    def written(transport, tp):
        layout = [f"layout.tp={tp}", "layout.sequence_parallel=true"]
        config = configured(*ONE, *layout, "model.context=25")
        trainer = build(transport, config, source=source_of(config)).trainer
        found = [
            trainer.logits(np.arange(rows * length).reshape(rows, length))
            for rows, length in ((1, 1), (3, 7), (5, 25))
        ]
        return list(islice(tokens(trainer, [3, 5], 0.8, 40, transport.rank), 30)), found

    ((text, logits),) = run_ranks(1, written, 1)
    for ranks, tp in ((2, 2), (6, 3)):
        for wrote, found in run_ranks(ranks, written, tp):
            assert wrote == text
            assert all(
                one.shape == other.shape and np.all(np.abs(one - other) <= 1e-9)
                for one, other in zip(found, logits, strict=True)
            )
