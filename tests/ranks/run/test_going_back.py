"""Snapshots are checkpoints in memory, and a run that goes back after a spike is one that never saw its batches."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from mpitrain.errors import ConfigError, MpitrainError, TrainingError
from mpitrain.parallel.replica import RecentLosses, Replica
from mpitrain.run.build import build
from mpitrain.run.checkpoint.manifest import Done, newest
from mpitrain.run.checkpoint.snapshot import Snapshots
from mpitrain.run.loop import Checkpoints
from mpitrain.transport.threads import run_ranks
from tests.runs import go, records
from tests.saving import save
from tests.training import TINY, configured, stepped

HALF = "precision.compute=bfloat16"
MODES = [
    (1, "precision.compute=float16"),
    (2,),
    (2, HALF),
    *((ranks, f"replication.zero={stage}") for ranks, stage in ((3, 1), (2, 2), (3, 3))),
    *((2, HALF, f"replication.zero={stage}") for stage in (1, 2, 3)),
    (
        4,
        "replication.zero=3",
        "layout.pp=2",
        "pipeline.schedule=breadth-first",
        "pipeline.chunks=2",
    ),
    (4, "replication.zero=1", "layout.pp=2", "layout.tp=2", "batch.micro_batches=2"),
    (2, "layout.cp=2", "model.tied=true"),
    (2, "replication.wire=topk"),
    (3, "replication.wire=powersgd", "replication.dense_steps=0"),
    (2, "lora.rank=2"),
    (2, "optimizer.name=adamw8bit", "replication.zero=1", "model.freeze=['embedding.*']"),
    (3, "replication.mode=master"),
    (3, "replication.mode=server", "replication.servers=2"),
    (2, "replication.mode=local", "replication.outer_momentum=0.9", "replication.period=2"),
    (3, "replication.mode=gossip"),
]


@pytest.mark.parametrize("ranks, settings", [(mode[0], mode[1:]) for mode in MODES], ids=str)
def test_a_restored_snapshot_is_the_checkpoint_of_its_step(ranks, settings, tmp_path):
    """Arrays and scalars, bit for bit; and so are the next steps, in which nothing gathered or rounded before is left."""

    def state(trainer):
        trainer.sync_parameters()
        scalars = trainer.replica.skips.scalars()
        return scalars, [buffer.array[:].tobytes() for buffer in trainer.replica.state()]

    def gone_back(transport, config):
        trainer, source, _ = build(transport, config)
        snapshots = Snapshots(trainer)
        for step in (0, 1, 2):  # The third is copied over the first.
            snapshots.take(2 * step)
            if step == 2:
                save(tmp_path, trainer, Done(4, 48, "run"), 1)
            stepped(trainer, source, (2 * step, 2 * step + 1))
        trainer.evaluate(source)  # It gathers what is then no longer valid.
        assert snapshots.restore(6) == 4
        restored = state(trainer)
        return restored, stepped(trainer, source, (6, 7)), state(trainer)

    def loaded(transport, config):
        trainer, source, _ = build(transport, config, newest(tmp_path))
        skips = trainer.replica.skips
        skips.restore({**skips.scalars(), "skipped_updates": skips.number + 2})
        restored = state(trainer)
        return restored, stepped(trainer, source, (6, 7)), state(trainer)

    config = configured(*TINY, *settings)
    for one, other in zip(
        run_ranks(ranks, gone_back, config), run_ranks(ranks, loaded, config), strict=True
    ):
        assert one[0] == other[0] and one[2] == other[2]
        for found, wanted in zip(one[1], other[1], strict=True):
            assert found._replace(comm_s=0, extras={}) == wanted._replace(comm_s=0, extras={})


SPIKY = [
    "run.steps=24",
    "run.spike=3",
    "optimizer.lr=0.1",
    "optimizer.warmup=3",
    "checkpoint.every=0",
]
BACK = [*SPIKY, "run.on_spike=back", "run.snapshot_every=5"]


def planted(monkeypatch, targets):
    """Replace targets: {step, from 1: their value}."""
    batch = Replica.batch

    def spoilt(rows, source, step, before=None):
        inputs, right = batch(rows, source, step, before)
        return inputs, np.full_like(right, targets[step + 1]) if step + 1 in targets else right

    monkeypatch.setattr(Replica, "batch", spoilt)


def losses(tmp_path):
    return {one["step"]: one["loss"] for one in records(tmp_path) if "lr" in one}


def tensors(tmp_path):
    folder = newest(tmp_path / "run/checkpoints")
    files = sorted(folder.glob("*.safetensors"))
    return {name: array.tobytes() for file in files for name, array in load_file(file).items()}


@pytest.mark.parametrize(
    "reaction, ranks, settings",
    [
        ("skip", 1, []),
        ("skip", 3, ["replication.mode=server", "replication.servers=1"]),
        ("back", 2, ["replication.zero=3"]),
        ("back", 3, ["replication.zero=1", HALF]),
        ("back", 2, ["layout.pp=2", "pipeline.schedule=zero-bubble", "batch.micro_batches=3"]),
    ],
    ids=str,
)
def test_a_run_with_a_spike_is_one_that_never_saw_its_batches(
    reaction, ranks, settings, book, tmp_path, monkeypatch
):
    keys = [*book, *BACK, f"run.on_spike={reaction}", *settings]
    planted(monkeypatch, {18: 255})
    go(ranks, keys)
    spiky, found, lines = losses(tmp_path), tensors(tmp_path), records(tmp_path)
    assert [one["step"] for one in lines if "spike" in one] == [18]
    back = [(one["step"], one["to"], one["undone"]) for one in lines if one.get("event") == "back"]
    assert back == ([(18, 15, 2)] if reaction == "back" else [])
    monkeypatch.undo()
    planted(monkeypatch, dict.fromkeys((16, 17, 18) if back else (18,), -100))
    go(ranks, [*keys, f"run.out={tmp_path / 'never' / 'run'}"])
    never = losses(tmp_path / "never")
    assert [spiky[step] for step in range(19, 25)] == [never[step] for step in range(19, 25)]
    assert spiky[24] < 4 < spiky[18] and found == tensors(tmp_path / "never")


def test_a_spike_after_going_back_goes_to_the_snapshot_before(book, tmp_path, monkeypatch):
    """The snapshot of step 15 is bad here. A new checkpoint is written, for that of step 15 has what is undone."""
    keys = [*book, *BACK, "checkpoint.every=15"]
    planted(monkeypatch, {17: 255, 18: 255})
    go(2, keys)
    back = [(one["step"], one["to"]) for one in records(tmp_path) if one.get("event") == "back"]
    assert back == [(17, 15), (18, 10)]
    whole = losses(tmp_path)
    shutil.rmtree(newest(tmp_path / "run/checkpoints"))
    go(2, keys, "yes")
    (resumed,) = (one for one in records(tmp_path) if one.get("event") == "resume")
    assert resumed["step"] == 18 and losses(tmp_path) == whole


def test_a_resumed_run_goes_back_as_the_whole_run_did(book, tmp_path, monkeypatch):
    keys = [*book, *BACK, "checkpoint.every=8"]
    planted(monkeypatch, {19: 255, 22: 255})
    go(2, keys)
    whole = losses(tmp_path)
    shutil.rmtree(newest(tmp_path / "run/checkpoints"))
    go(2, keys, "yes")
    lines = records(tmp_path)
    assert losses(tmp_path) == whole and any(one.get("event") == "resume" for one in lines)
    assert [(one["step"], one["to"]) for one in lines if "undone" in one] == [(19, 16), (22, 20)]
    # So does one with a disk so slow that saves are skipped.
    monkeypatch.setattr(Checkpoints, "_is_over", lambda self: False)
    go(2, [*keys, f"run.out={tmp_path / 'slow' / 'run'}"])
    assert losses(tmp_path / "slow") == whole


def test_spikes_end_a_run_as_other_skipped_steps_do(book, tmp_path, monkeypatch):
    planted(monkeypatch, dict.fromkeys(range(19, 40), 255))
    with pytest.raises(TrainingError, match=r"a spike, or were undone, among them the last 10"):
        go(2, [*book, *BACK, "run.steps=40"])
    planted(monkeypatch, {})


def test_the_mean_and_the_deviation_are_of_the_first_losses_and_follow_the_last():
    recent, drawn = RecentLosses(4.0), np.random.default_rng(0).normal(3, 0.1, 400)
    for number, loss in enumerate(drawn[:50], 1):
        assert recent.accepts(loss) and abs(recent.mean - drawn[:number].mean()) < 1e-12
        assert abs(recent.variance - drawn[:number].var()) < 1e-12
    assert not recent.accepts(3.6) and not recent.accepts(float("nan"))
    assert recent.accepts(2.0) and recent.accepts(drawn[50])
    other = RecentLosses(4.0)
    other.restore(recent.numbers())
    assert vars(other) == vars(recent)
    for loss in drawn + 1:
        recent.accepts(loss - 0.5), recent.accepts(loss)
    assert abs(recent.mean - 3.75) < 0.3


@pytest.mark.counted
def test_going_back_needs_steps_in_common_and_memory(book, tmp_path):
    for mode in ("replication.mode=local", "pipeline.schedule=async"):
        with pytest.raises(ConfigError, match=r"run.on_spike compares the losses of steps that"):
            configured(*BACK, mode)
    with pytest.raises(
        MpitrainError, match=r"on_spike=back 2 rank.* copy [\d.]+ GB .* [\d.]+ GB are left"
    ) as error:
        go(2, [*book, *BACK, "memory.limit_gb=0.0003"])
    assert error.value.agreed and "run.on_spike to skip" in error.value.way_out
    assert not (tmp_path / "run").exists()
