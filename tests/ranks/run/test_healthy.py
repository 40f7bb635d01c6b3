"""Healthy runs with something that takes longer than run.stall_seconds: no rank is blamed."""

import time

import pytest

from mpitrain.formats.safetensors_files import Writing
from mpitrain.run.metrics import METRICS, read_metrics
from tests.runs import TINY, go

STALL, ONCE = 2.0, 0.4  # seconds; a busy machine may take several times ONCE
WRITE = 0.06  # seconds; a checkpoint has some 50 writes


def slowed(monkeypatch, place, name, seconds):
    real = getattr(place, name)

    def slow(*rest):
        time.sleep(seconds)
        return real(*rest)

    monkeypatch.setattr(place, name, slow)


@pytest.mark.parametrize(
    "settings, place, name",
    [
        (["run.eval_every=6", "run.eval_rows=64"], None, "evaluation"),
        (["checkpoint.every=6"], Writing, "write"),
        (["run.delay=1:400", "run.eval_every=-1"], None, "computation"),
    ],
    ids=["evaluation", "disk", "computation"],
)
def test_progress_that_is_slow_blames_no_rank(settings, place, name, tmp_path, monkeypatch, capfd):
    text, run, done = tmp_path / "book", tmp_path / "run", []
    text.write_text("word " * 2000)
    if place:
        slowed(monkeypatch, place, name, WRITE if place is Writing else 0)

    def in_evaluation(rank):
        if name == "evaluation" and rank == 1:
            done.append(rank)
            time.sleep(ONCE if len(done) > 6 else 0)
        return False

    began = time.monotonic()
    job = [*TINY, f"data.source=text:{text}", f"run.out={run}", "run.sample=0", *settings]
    go(2, [*job, f"run.stall_seconds={STALL}", "run.on_stall=warn"], stop=in_evaluation)
    assert time.monotonic() - began > STALL
    assert ": the run stands still" not in capfd.readouterr().err
    assert read_metrics(run / METRICS)[-1]["event"] == "end"
