"""Frozen parameters: every layout trains the rest as one rank does, and nothing of a frozen tensor is sent or updated."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.errors import ConfigError
from mpitrain.run.build import build
from mpitrain.run.checkpoint.manifest import Done, newest
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import run_ranks
from tests.saving import save
from tests.training import TINY, assert_parts, configured, held, stepped

STEPS = 3
EXACT = [*TINY, f"run.steps={STEPS}", "precision.compute=float64", "optimizer.clip=0.0"]
FREEZE = {
    "units before": ["embedding.*", "blocks.0.*"],
    "mixed units": ["*.weight", "embedding.tokens"],
    "all but one": ["embedding.*", "blocks.*", "head.norm.*"],
    "a tied tensor": ["embedding.*", "blocks.1.attention.qkv.*"],
    "norms and biases": ["*.norm.*", "*.bias", "embedding.positions"],
}
CHOSEN = [*((name, False) for name in FREEZE), ("a tied tensor", True), ("all but one", True)]
LAYOUTS = {
    "dp": (3, "replication.algorithm=ring batch.micro_batches=2"),
    "zero 1": (2, "replication.zero=1"),
    "zero 2": (2, "replication.zero=2 batch.micro_batches=2"),
    "zero 3": (3, "replication.zero=3 batch.micro_batches=2"),
    "zero 3 in turn": (2, "replication.zero=3 replication.overlap=false"),
    "zero 3 kept": (2, "replication.zero=3 replication.zero_keep=1200 batch.micro_batches=2"),
    "tp": (2, "layout.tp=2"),
    "sequence": (4, "layout.tp=2 layout.sequence_parallel=true replication.zero=2"),
    "pp": (3, "layout.pp=3"),
    "zero bubble": (2, "layout.pp=2 pipeline.schedule=zero-bubble"),
    "interleaved": (2, "layout.pp=2 pipeline.schedule=interleaved batch.micro_batches=2"),
    "breadth first": (
        4,
        "layout.pp=2 pipeline.schedule=breadth-first replication.zero=3 batch.micro_batches=2",
    ),
    "gpipe": (4, "layout.pp=2 pipeline.schedule=gpipe replication.zero=2 batch.micro_batches=2"),
    "dp x tp x pp": (8, "layout.pp=2 layout.tp=2"),
    "master": (3, "replication.mode=master"),
    "servers": (4, "replication.mode=server replication.servers=2"),
}


def frozen(patterns):
    return f"model.freeze={patterns}"


def trained(transport, settings, after=lambda trainer: None):
    """The losses and norms of each step, and what this rank holds of tensors."""
    trainer, source, _ = build(transport, configured(*EXACT, *settings))
    found = []
    for index in range(STEPS):
        (result,) = stepped(trainer, source, [index])
        found.append((result.loss, after(trainer) or result.grad_norm))
    assert replicas_equal(trainer)
    return np.array(found), held(trainer)


def dropped(transport, settings, patterns):
    """What `trained` returns on one rank that freezes nothing, but restores frozen tensors after each update."""
    with_names = build(transport, configured(*EXACT, *settings, frozen(patterns))).trainer
    names = {entry.name for entry in with_names.storage.frozen.entries}
    first = with_names.tensors()

    def restore(trainer):
        squares = 0.0
        for entry in trainer.storage.entries:
            if entry.name in names:
                entry.view(trainer.parameters)[...] = first[entry.name]
            else:
                squares += float((entry.view(trainer.gradients) ** 2).sum())
        return squares**0.5

    return trained(transport, settings, restore)


def alone(patterns, *settings):
    return run_ranks(1, dropped, settings, patterns)[0]


@pytest.mark.slow
@pytest.mark.parametrize("turn, chosen, tied", [(n, *row) for n, row in enumerate(CHOSEN)])
def test_every_layout_equals_a_rank_that_drops_frozen_gradients(turn, chosen, tied):
    """Each layout has frozen tensors of two kinds or three, and each kind is frozen in a third of the layouts."""
    tie, patterns = [f"model.tied={str(tied).lower()}"], FREEZE[chosen]
    if tied and chosen == "all but one":
        patterns = ["blocks.*", "head.norm.*", "embedding.positions"]
    curve, tensors = alone(patterns, *tie)
    for name, (ranks, settings) in [("one", (1, "")), *[*LAYOUTS.items()][turn % 3 :: 3]]:
        for found, own in run_ranks(ranks, trained, [*settings.split(), *tie, frozen(patterns)]):
            assert np.all(np.abs(found - curve) <= 1e-9), name
            assert_parts(own, tensors, name)
            assert name != "one" or all(np.array_equal(tensors[t][1], own[t][1]) for t in own)


def test_with_all_but_one_tensor_frozen_the_bytes_sent_are_its_own():
    names = ["embedding.*", "blocks.0.*", "blocks.1.mlp.*", "blocks.1.attention.[no]*"]
    names += ["blocks.1.attention.qkv.weight", "head.*"]

    def sent(transport, algorithm, zero):
        chosen = [f"replication.algorithm={algorithm}", f"replication.zero={zero}"]
        trainer, source, _ = build(transport, configured(*EXACT, *chosen, frozen(names)))
        (entry,) = trainer.storage.entries
        first, traffic, counts = trainer.tensors(), trainer.transport.traffic, []
        for index in range(3):
            before = traffic.nbytes
            trainer.step(index, *trainer.replica.batch(source, index))
            trainer.sync_parameters()
            counts.append(traffic.nbytes - before)
        last = trainer.tensors()
        changed = [name for name in last if not np.array_equal(first[name], last[name])]
        assert changed == [entry.name] and entry.name.endswith("qkv.bias")
        state = [k for k in trainer.replica.state() if k.name == "first_moment"]
        assert [k.array.size for k in state] == [trainer.storage.length // (2 if zero else 1)]
        return trainer.storage.length, set(counts)

    for zero in (0, 1, 2):
        for length, counts in run_ranks(2, sent, "ring", zero):
            chunks = [stop - start for start, stop in chunk_bounds(length, 2)]
            assert length == 64 and counts == {8 * sum(chunks) + 8 * 5}, (zero, counts)


@pytest.mark.parametrize("schedule", ("1f1b", "zero-bubble", "interleaved", "async", "async-2bw"))
def test_units_before_the_first_trained_one_run_no_backward(schedule):
    """No unit of the first stage has a trained tensor; on the second, the first trained unit is the third."""

    def run(transport):
        settings = ["layout.pp=2", "batch.micro_batches=4", f"pipeline.schedule={schedule}"]
        chunks = 2 if schedule == "interleaved" else 1
        partition = "4,6" if chunks == 1 else "2,2,4,2"
        settings += ["model.layers=4", f"pipeline.partition={partition}"]
        patterns = ["embedding.*", "blocks.[01].*", "blocks.2.attention.*"]
        trainer, source, _ = build(transport, configured(*EXACT, *settings, frozen(patterns)))
        ran = []
        for part, stage in trainer.pipe.stages.items():
            for number, layer, *_ in stage._units:
                name = trainer.units[number].name

                def noted(*given, right=layer.backward_input, name=name):
                    ran.append(name)
                    return right(*given)

                layer.backward_input, layer.backward = noted, None
            assert part >= trainer.pipe.lowest or stage._frozen >= len(stage._units)
        for index in range(2):
            trainer.step(index, *trainer.replica.batch(source, index))
        assert trainer.pipe.channel.sent["gradient"][0] == {
            ("interleaved", 1): 4  # to the third chunk
        }.get((schedule, transport.rank), 0)
        trainer.sync_parameters()
        assert trainer.arena.live == 0
        return set(ran)

    ran = set().union(*run_ranks(2, run))
    assert ran == {"blocks.2.mlp", "blocks.3.attention", "blocks.3.mlp", "head"}


@pytest.mark.parametrize(
    "patterns, word", [(["blocks.7.*"], "'blocks.7.*'"), (["*"], "29"), (["head.*", ""], "''")]
)
def test_bad_freeze_patterns_are_refused_on_every_rank(patterns, word):
    for settings in ([], ["layout.pp=2"]):
        with pytest.raises(ConfigError, match=r"model\.freeze") as raised:
            run_ranks(2, build, configured(*EXACT, *settings, frozen(patterns)))
        assert raised.value.agreed and raised.value.exit_code == 2 and word in str(raised.value)


def steps(transport, settings, first, count, saved=None, folder=None):
    """Some steps from a checkpoint or the beginning; a checkpoint at their end."""
    trainer, source, done = build(transport, configured(*settings), saved)
    assert done.step == first
    stepped(trainer, source, range(first, first + count))
    if folder:
        save(folder, trainer, Done(first + count, 0, "run"), keep=3)
    trainer.sync_parameters()
    return held(trainer)


@pytest.mark.parametrize(
    "compute, kind",
    [
        ("float64", "cpu"),
        ("bfloat16", "cpu"),
        pytest.param("bfloat16", "cuda-sim", marks=pytest.mark.compile),
    ],
)
def test_a_checkpoint_has_each_tensor_once_and_loads_in_any_layout(compute, kind, tmp_path):
    base = [*TINY, "model.layers=1", frozen(FREEZE["mixed units"]), f"precision.compute={compute}"]
    base += [f"device.kind={kind}", "run.steps=6"]
    first = run_ranks(3, steps, [*base, "replication.zero=3"], 0, 2, None, tmp_path)[0]
    files = {}
    for file in newest(tmp_path).glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert name not in files
            files[name] = tensor
    states = [name for name in files if "_moment/" in name]
    assert {name for name in files if name not in states} == {*first}
    trained = {name for name in first if any(f"/{name}/" in state for state in states)}
    assert trained and not any(name.endswith("weight") for name in trained)
    for name in {*first} - trained:
        assert np.array_equal(files[name].astype(first[name][1].dtype), first[name][1])
    for ranks, settings in (
        (1, ""),
        (2, "layout.tp=2"),
        (4, "layout.pp=2 replication.zero=1"),
        (3, "replication.mode=server"),
        (2, "replication.zero=2"),
    ):
        loaded = run_ranks(ranks, steps, [*base, *settings.split()], 2, 0, newest(tmp_path))
        for own in loaded:
            for name, (region, value) in own.items():
                assert np.array_equal(region.part_of(first[name][1]), value), (settings, name)


@pytest.mark.slow
@pytest.mark.compile
def test_the_kernels_of_the_simulator_train_the_rest_as_the_host_does():
    patterns = FREEZE["mixed units"]
    curve, tensors = alone(patterns, "model.layers=1")
    chosen = ["model.layers=1", "replication.zero=3", "device.kind=cuda-sim", frozen(patterns)]
    for found, own in run_ranks(2, trained, chosen):
        assert np.all(np.abs(found - curve) <= 1e-9)
        assert_parts(own, tensors)


@pytest.mark.parametrize(
    "compute, layouts",
    [
        ("bfloat16", [(2, "replication.zero=1"), (2, "layout.tp=2")]),
        (
            "float16",
            [(3, "replication.zero=3"), (4, "layout.pp=2"), (3, "replication.mode=server")],
        ),
    ],
)
def test_in_half_precision_every_layout_has_the_losses_of_one_rank(compute, layouts):
    chosen = [f"precision.compute={compute}", frozen(FREEZE["units before"])]
    truth = run_ranks(1, trained, chosen)[0][0]
    for ranks, settings in layouts:
        for found, _ in run_ranks(ranks, trained, [*settings.split(), *chosen]):
            assert np.all(np.abs(found / truth - 1) <= 0.01), settings


@pytest.mark.parametrize(
    "ranks, settings, base",
    [
        (2, "replication.mode=server replication.update=async", ""),
        (3, "replication.mode=local replication.period=1 optimizer.name=sgd", ""),
        (2, "pipeline.schedule=async layout.pp=2", "pipeline.schedule=async"),
        (4, "pipeline.schedule=async-2bw layout.pp=2", "pipeline.schedule=async-2bw"),
    ],
)
def test_async_modes_equal_one_rank_where_nothing_is_late(ranks, settings, base):
    """Of one worker no gradient is late, and none on the last stage; a period of one step averages gradients."""
    common = [frozen(["embedding.*", "blocks.0.*", "head.norm.*"]), "batch.micro_batches=2"]
    common += ["pipeline.partition=3,3"] if "pp=2" in settings else []
    common += [word for word in settings.split() if word.startswith("optimizer")]
    alike = [word for word in common if "partition" not in word]
    (alone,) = run_ranks(1, steps, [*EXACT, *alike, *base.split()], 0, STEPS)
    for own in run_ranks(ranks, steps, [*EXACT, *common, *settings.split()], 0, STEPS):
        assert_parts(own, alone)
