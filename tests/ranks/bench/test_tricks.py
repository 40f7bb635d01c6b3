"""A job with and without each trick, on threads: bytes, reasons and tricks that are used already."""

import pytest

from mpitrain.run.build import build
from mpitrain.tools.bench.comparison.tricks import TRICKS, checks, try_all
from mpitrain.transport.threads import run_ranks
from tests.training import MLP, TINY, configured

RING = ["replication.algorithm=ring", "run.steps=100"]


OF_REPLICAS = {"ZeRO 1", "overlap", "wire int8"}
OF_AXES = {"sequence parallelism", "context parallelism"}


def tried(ranks, names, *settings):
    """{trick: (the row without it, the row with it), or the row with a reason} after one block of one step on threads."""

    def one(transport):
        job = build(transport, configured(*settings, *RING))
        found = {rows[-1].side: rows for rows in try_all(transport, job, names, 1, 1)}
        job.close()
        return found

    return run_ranks(ranks, one)[0]


@pytest.mark.parametrize("ranks, layout", [(1, []), (2, []), (2, ["layout.tp=2"]), (3, [])])
def test_bytes_with_and_without_each_trick_are_the_counted_ones(ranks, layout):
    names = [name for name in TRICKS if name != "compiled passes"]
    found = tried(ranks, names, *TINY, *layout)
    having = {trick: rows[1] for trick, rows in found.items() if len(rows) == 2}
    activations, sent = checks([row for rows in found.values() for row in rows])
    assert activations == (2 * len(having), 2 * len(having))
    assert sent[0] == sent[1] and (ranks == 1 or layout or sent[1] > 10)
    assert having["recomputation"].space < 1 < having["mixed precision"].space
    assert having["larger batch"].space > 1 > having["another optimizer"].space
    assert having["prefetch"].space == 1 and having["prefetch"].is_used


def test_bytes_are_the_counted_ones_where_the_update_needs_more_than_the_activations():
    (found,) = tried(2, ["recomputation"], *TINY, "batch.micro_batches=4", "batch.size=8").values()
    assert checks(found)[0] == (2, 2)


@pytest.mark.parametrize(
    "trick, own",
    [
        ("recomputation", "memory.recompute=2"),
        ("ZeRO 1", "replication.zero=1"),
        ("gradient accumulation", "batch.micro_batches=3"),
    ],
)
def test_a_trick_that_the_job_has_is_compared_with_the_job_without_it(trick, own):
    plain_off, plain = tried(2, [trick], *TINY)[trick]
    used_off, used = tried(2, [trick], *TINY, own)[trick]
    assert used.is_used and not plain.is_used and used.settings == [own]
    assert used_off.memory == plain_off.memory and used.space < 1


@pytest.mark.parametrize(
    "ranks, settings, absent",
    [
        (1, TINY, {"ZeRO 2", "ZeRO 3", *OF_REPLICAS, *OF_AXES}),
        (
            2,
            [*TINY, "layout.pp=2", "pipeline.schedule=gpipe"],
            {"gradient accumulation", "sequence parallelism", *OF_REPLICAS},
        ),
        (2, [*TINY, "replication.mode=master"], {"logits in slices", *OF_REPLICAS}),
        (2, MLP, {"LoRA", "attention in tiles", *OF_AXES}),
        (2, [*TINY, "model.kind=bert"], {"sequence parallelism"}),
        (3, TINY, OF_AXES),
        (2, [*TINY, "precision.compute=float64"], {"mixed precision", "wire int8"}),
        (2, [*TINY, "optimizer.name=sgd"], {"8-bit optimizer", "another optimizer"}),
        (2, [*TINY, "replication.zero=3"], {"ZeRO 1", "ZeRO 2"}),
        (2, [*TINY, "replication.wire=fp16"], {"wire int8"}),
    ],
)
def test_a_trick_that_does_not_apply_has_a_reason(ranks, settings, absent):
    found = tried(ranks, sorted(absent | {"recomputation", "LoRA"}), *settings)
    assert {name for name, rows in found.items() if rows[-1].reason} == absent
    assert all(len(found[name][-1].reason) > 10 for name in absent)
