"""`plan layout` counts what real ranks hold and send, in every kind of layout."""

import pytest

from mpitrain.ops.host import experts as host
from mpitrain.ops.reference.experts import choose
from mpitrain.run.build import build
from mpitrain.tools.plan.layout import ParallelLayout, Planner
from mpitrain.tools.plan.mode_traffic import CONTROL, CONTROL_ITEM
from mpitrain.transport.threads import run_ranks
from tests.training import configured

JOB = ["layers=3", "width=48", "heads=6", "context=16"]
RINGS = ["replication.algorithm=ring", "layout.algorithm=ring", "device.kind=cpu", "run.steps=2"]


def held_and_sent(transport, config):
    trainer, source, _ = build(transport, config)
    for step in range(2):
        trainer.replica.sync()  # all-gathers of the step before may be under way
        before = transport.traffic.nbytes
        trainer.step(step, *trainer.replica.batch(source, step))
    trainer.replica.sync()
    sent, held = transport.traffic.nbytes - before, trainer.replica.held_by_kind()
    return sum(held.values()) - held["scratch"] + trainer.pipe.peak_bytes, sent


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ((1, 1, 1, 0, 3, "unit"), []),
        ((2, 1, 1, 0, 1, "none"), []),
        ((2, 1, 1, 2, 2, "none"), []),
        ((2, 1, 1, 3, 2, "unit"), []),
        ((1, 1, 1, 1, 2, "none", 2), []),
        ((1, 1, 1, 0, 2, "none", 2), ["layout.cp_mode=ring"]),
        ((1, 2, 1, 0, 2, "unit"), ["layout.sequence_parallel=true"]),
        ((1, 2, 1, 0, 2, "none"), ["model.kind=llama"]),
        ((1, 1, 2, 0, 5, "none"), []),
        ((1, 1, 2, 0, 4, "none"), ["pipeline.schedule=zero-bubble"]),
        ((1, 1, 2, 0, 4, "none"), ["pipeline.schedule=interleaved"]),
        ((2, 1, 2, 3, 4, "unit"), ["pipeline.schedule=gpipe"]),
        ((1, 2, 2, 0, 2, "none"), []),
    ],
)
def test_bytes_of_the_fullest_and_the_busiest_rank_are_those_of_real_ones(layout, settings):
    chosen = ParallelLayout(*layout)
    ranks, words = chosen.axes.ranks, [*(f"model.{key}" for key in JOB), *RINGS, *settings]
    given = configured("batch.size=16", *words)
    plan = Planner(given, ["a"] * ranks, 1e9, 1e9)
    held, sent = zip(*run_ranks(ranks, held_and_sent, chosen.of(given)), strict=True)
    assert plan.predict(chosen).nbytes == max(held)
    assert plan.sent(chosen) == max(sent)


@pytest.mark.parametrize("settings", [[], ["model.shared=8", "batch.micro_batches=2"]], ids=str)
def test_memory_and_tokens_of_an_unlucky_rank_are_those_of_a_real_one(settings):
    """The router is 0, so all tokens choose the first experts: rank 0 has twice the mean rows."""
    experts = ["model.experts=4", "model.top_k=2", "model.balance=0.0", *settings]
    words = [*(f"model.{key}" for key in JOB), *RINGS, *experts]
    given = configured("batch.size=8", *words)
    m = given.batch.micro_batches or 1
    chosen = ParallelLayout(2, 1, 1, 0, m, "none", 1, 2)

    def run(transport):
        trainer, source, _ = build(transport, chosen.of(given))
        for entry in trainer.storage.entries:
            if "router" in entry.name:
                entry.view(trainer.replica.parameters)[:] = 0
        rows = trainer.replica.batch(source, 0)
        before = transport.traffic.nbytes
        trainer.step(0, *rows)
        sent, held = transport.traffic.nbytes - before, trainer.replica.held_by_kind()
        spans = trainer.storage.spans
        summed = sum(span.stop - span.start for span in spans if span.holders != "ep")
        told = 8 * 4 * 3 * m  # the counts of 4 experts, in 3 layers
        # Each rank sends half of the gradients that both have, twice; and the control message, which
        # has the rows that 4 experts were asked for and took.
        rest = summed * trainer.storage.dtype.itemsize + (CONTROL + 2 * 4) * CONTROL_ITEM + told
        held_bytes = sum(held.values()) - held["scratch"] + trainer.pipe.peak_bytes
        return held_bytes, sent - rest, sent

    held, tokens, sent = zip(*run_ranks(2, run), strict=True)
    plan = Planner(given, ["a"] * 2, 1e9, 1e9, imbalance=2.0)
    assert plan.predict(chosen).nbytes == held[0] > held[1]
    assert plan.tokens_sent(chosen) == tokens[0]
    assert plan.sent(chosen) == sent[0]


@pytest.mark.parametrize(
    "zero, cp, shard",
    [(0, 2, "all"), (1, 1, "host"), (2, 1, "all"), (3, 1, "all"), (3, 1, "host"), (3, 2, "all")],
)
def test_bytes_are_those_of_real_ranks_with_experts_that_zero_shards(zero, cp, shard, monkeypatch):
    """All tokens choose the experts of the first rank, so that its replica sends twice the mean."""

    def first(logits, *arguments):
        return choose(0 * logits, *arguments)

    monkeypatch.setattr(host, "choose", first, raising=False)
    experts = ["model.experts=4", "model.top_k=2", "model.balance=0.0"]
    more = [*(f"model.{key}" for key in JOB), *RINGS, *experts, f"replication.zero={zero}"]
    more.append(f"replication.shard={shard}")
    given, hosts = configured("batch.size=8", *more), ["a", "a", "b", "b"]
    chosen = ParallelLayout(4 // cp, 1, 1, zero, 2, "unit", cp, 2)
    _, sent = zip(*run_ranks(4, held_and_sent, chosen.of(given), hosts=hosts), strict=True)
    assert Planner(given, hosts, 1e9, 1e9, imbalance=2.0).sent(chosen) == max(sent)
