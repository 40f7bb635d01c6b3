"""A run in which a rank stands still: one warning, and the answers of the living run."""

import os
import time

from mpitrain.run.checkpoint import saving
from mpitrain.run.metrics import METRICS, read_metrics
from mpitrain.tools.report.text import what_happens_now
from tests.runs import TINY, go


def test_a_stall_is_warned_of_once_and_the_living_run_answers(tmp_path, capfd, monkeypatch):
    # On a busy machine the first steps may compute for seconds, and --now would be as patient.
    monkeypatch.setattr("mpitrain.tools.report.text.longest", lambda timeline: 0.0)
    text, run = tmp_path / "book", tmp_path / "run"
    text.write_text("word " * 2000)
    said = []

    def stand(rank):
        if rank == 1 and not said:
            time.sleep(3.3)
            said.extend(what_happens_now(run, True))
        return False

    settings = [*TINY, "run.steps=3", "run.stall_seconds=1", "run.on_stall=warn"]
    go(3, [*settings, f"data.source=text:{text}", f"run.out={run}", "run.sample=0"], stop=stand)
    assert said[0].startswith("rank 1 on localhost has not moved for ")
    assert "no answer" not in "".join(said) and any("in stand" in line for line in said)
    errors = capfd.readouterr().err
    # A busy machine may have stalls of its own; the innermost frame of rank 1 is in this one.
    reports = [one for one in errors.split(": the run stands still")[1:] if "in stand\n" in one]
    assert len(reports) == 1 and "rank 1" in reports[0]
    assert read_metrics(run / METRICS)[-1]["event"] == "end"
    assert not [name for name in os.listdir(run / "trace") if name.startswith(("ask", "answer"))]


def test_without_traces_a_slow_publication_of_a_checkpoint_is_no_stall(
    tmp_path, capfd, monkeypatch
):
    """Rank 1 waits for rank 0, whose every file counts, but which it cannot see."""
    place, text = saving.put_in_place, tmp_path / "book"
    text.write_text("word " * 2000)

    def slow(*arguments):
        for _ in range(20):
            time.sleep(0.1)
            arguments[-1]()
        place(*arguments)

    monkeypatch.setattr(saving, "put_in_place", slow)
    settings = [*TINY, "run.steps=1", "run.stall_seconds=1", "run.on_stall=warn", "run.trace=false"]
    go(2, [*settings, f"data.source=text:{text}", f"run.out={tmp_path / 'run'}", "run.sample=0"])
    assert "no progress" not in capfd.readouterr().err
