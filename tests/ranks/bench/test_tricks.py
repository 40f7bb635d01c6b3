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
    """{name: trick} after one block of one step on threads."""

    def one(transport):
        job = build(transport, configured(*settings, *RING))
        found = [*try_all(transport, job, names, 1, 1)]
        job.close()
        return found

    return {each.name: each for each in run_ranks(ranks, one)[0]}


@pytest.mark.parametrize("ranks, layout", [(1, []), (2, []), (2, ["layout.tp=2"]), (3, [])])
def test_bytes_with_and_without_each_trick_are_the_counted_ones(ranks, layout):
    names = [name for name in TRICKS if name != "compiled passes"]
    found = tried(ranks, names, *TINY, *layout)
    measured = [each for each in found.values() if not each.reason]
    activations, sent = checks(measured)
    assert activations == (2 * len(measured), 2 * len(measured))
    assert sent[0] == sent[1] and (ranks == 1 or layout or sent[1] > 10)
    assert found["recomputation"].smaller < 1 < found["mixed precision"].smaller
    assert found["larger batch"].smaller > 1 > found["another optimizer"].smaller
    assert found["prefetch"].smaller == 1 and found["prefetch"].is_used


def test_bytes_are_the_counted_ones_where_the_update_needs_more_than_the_activations():
    (found,) = tried(2, ["recomputation"], *TINY, "batch.micro_batches=4", "batch.size=8").values()
    assert checks([found])[0] == (2, 2)


@pytest.mark.parametrize(
    "trick, own",
    [
        ("recomputation", "memory.recompute=2"),
        ("ZeRO 1", "replication.zero=1"),
        ("gradient accumulation", "batch.micro_batches=3"),
    ],
)
def test_a_trick_that_the_job_has_is_compared_with_the_job_without_it(trick, own):
    plain = tried(2, [trick], *TINY)[trick]
    used = tried(2, [trick], *TINY, own)[trick]
    assert used.is_used and not plain.is_used and used.settings == [own]
    assert used.off.memory == plain.off.memory and used.smaller < 1


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
    assert {name for name, each in found.items() if each.reason} == absent
    assert all(len(each.reason) > 10 for name, each in found.items() if name in absent)
