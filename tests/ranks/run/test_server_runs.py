"""Runs with parameter servers: what they log and evaluate, how they stop and fail, on every rank alike."""

import numpy as np
import pytest

from mpitrain.errors import TrainingError
from mpitrain.run.trainer import Trainer
from tests.runs import TEXT, TINY, go, records, validated

UPDATES = [
    ["replication.update=sync"],
    ["replication.update=async"],
    ["replication.update=bounded", "replication.staleness=1", "replication.servers=2"],
]
each_update = pytest.mark.parametrize("update", UPDATES, ids=("sync", "async", "bounded"))


@pytest.fixture
def settings(tmp_path):
    """Settings of a run on a small text."""
    (tmp_path / "book").write_text("".join(TEXT))
    return [
        *TINY,
        f"data.source=text:{tmp_path / 'book'}",
        f"run.out={tmp_path / 'run'}",
        "replication.mode=server",
    ]


@each_update
def test_a_run_logs_evaluates_and_ends_with_equal_replicas(update, settings, tmp_path):
    assert not go(5, [*settings, *update, "run.eval_every=2", "checkpoint.every=3"])
    found = records(tmp_path)
    steps = [record for record in found if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 7)) and validated(tmp_path) == [
        2,
        4,
        6,
    ]
    assert found[-1]["event"] == "end" and found[-1]["replicas_equal"] is True
    assert all(("staleness" in record) == (update != UPDATES[0]) for record in steps)
    assert update != UPDATES[2] or all(record["lead"] <= 1 for record in steps)


@each_update
@pytest.mark.parametrize("asked", (1, 3))
def test_a_stop_asked_of_a_worker_or_of_a_server_ends_the_run_on_all(
    update, asked, settings, tmp_path
):
    assert go(4, [*settings, *update, "run.steps=400"], stop=lambda rank: rank == asked)
    last = records(tmp_path)[-1]
    assert last["event"] == "stopped" and last["step"] <= (1 if update == UPDATES[0] else 3), last


@each_update
def test_a_nonfinite_gradient_ends_the_run_or_is_skipped_on_every_rank(
    update, settings, tmp_path, monkeypatch
):
    real, bad = Trainer.step, {2}

    def poisoned(trainer, index, inputs, targets, stop=False):
        if index in bad and trainer.share().stop == 6:
            trainer.replica.open(0, 0)["tokens"][:] = np.nan  # until the next pull
        return real(trainer, index, inputs, targets, stop)

    monkeypatch.setattr(Trainer, "step", poisoned)
    with pytest.raises(TrainingError, match="Step 3 has loss nan"):
        go(5, [*settings, *update])
    failed = [record for record in records(tmp_path) if record.get("skipped")]
    assert [record["step"] for record in failed] == [3]
    go(5, [*settings, *update, "run.on_nonfinite=skip", f"run.out={tmp_path / 'other'}"])
    bad |= {*range(6)}
    with pytest.raises(TrainingError, match="A run may not skip"):
        go(5, [*settings, *update, "run.on_nonfinite=skip", f"run.out={tmp_path / 'all/run'}"])
    assert records(tmp_path / "all")[-1]["event"] == "failed"


def test_a_run_moves_from_servers_to_all_reduce_and_back(tmp_path):
    (tmp_path / "book").write_text("".join(TEXT))
    common = [
        *TINY,
        f"data.source=text:{tmp_path / 'book'}",
        "precision.compute=float64",
        "optimizer.schedule=constant",
        "checkpoint.every=3",
    ]
    go(1, [*common, f"run.out={tmp_path / 'alone' / 'run'}", "run.steps=8"])
    alone = [record["loss"] for record in records(tmp_path / "alone") if "loss" in record]
    server = "replication.mode=server"
    for steps, ranks, mode in [
        (2, 4, [server]),
        (4, 2, ["replication.zero=1"]),
        (6, 3, [server, "replication.servers=2"]),
        (8, 2, [server, "replication.update=async"]),
        (10, 4, [server, *UPDATES[2]]),
        (12, 1, []),
    ]:
        go(
            ranks,
            [*common, f"run.out={tmp_path / 'run'}", f"run.steps={steps}", *mode],
            "no" if steps == 2 else "yes",
        )
    losses = [record["loss"] for record in records(tmp_path) if "loss" in record]
    assert len(losses) == 12 and np.all(np.abs(np.array(losses[:8]) - alone) <= 1e-9)
    assert all(
        record["replicas_equal"] for record in records(tmp_path) if record.get("event") == "end"
    )
