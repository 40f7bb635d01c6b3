"""`mpitrain plan batch` of a pipeline: the micro-batches that it names, and what it refuses. Never how fast."""

import importlib
import json
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.cli.job_options import configured
from mpitrain.cli.plan.jobs import plan_batch
from mpitrain.errors import ConfigError
from mpitrain.tools.bench import turns
from mpitrain.tools.plan import stages as measuring
from mpitrain.tools.plan.stages import MessageTime, way
from mpitrain.transport.threads import run_ranks

TINY = [
    "model.layers=2",
    "model.width=8",
    "model.heads=2",
    "model.context=8",
    "batch.size=8",
    "layout.pp=2",
    "device.kind=cpu",
]


def plan(transport, read, verified, json_file):
    plan_batch(transport, read, 4, 1.0, verified, json_file)


def test_it_names_a_count_of_its_table_and_measures_its_neighbours(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measuring, "FAR", math.inf)  # whatever else runs on this machine
    monkeypatch.setattr(turns, "FAR", math.inf)
    (tmp_path / "job.toml").write_text('[pipeline]\nschedule = "zero-bubble"\n[layout]\ndp = 2\n')
    run_ranks(
        4, plan, partial(configured, tmp_path / "job.toml", TINY), (1, 2), tmp_path / "found.json"
    )
    text = capsys.readouterr().out
    assert "2 stages by zero-bubble, 4" in text and "measured with 1, 2 row(s)" in text
    assert max(map(len, text.splitlines())) <= 130
    (named,) = map(int, re.findall(r"^Set batch.micro_batches to (\d+)\.$", text, re.M))
    found = json.loads((tmp_path / "found.json").read_text())
    rows = found["header"]["micro_batches"]
    assert [row["micro_batches"] for row in rows] == [2, 3, 4]
    assert min(rows, key=lambda row: row["step_s"])["micro_batches"] == named
    assert re.search(rf"^ +{named} .*<- best$", text, re.M)
    predicted, measured, stages = (
        text.partition(f"\n{head} ")[2].split("\n\n")[0]
        for head in (
            "micro-batches  rows",
            "micro-batches  predicted",
            f"stages of {named} micro-batches:\nstage",
        )
    )
    assert len(predicted.splitlines()) == 4 and len(stages.splitlines()) == 3
    verified = [int(line.split()[0]) for line in measured.splitlines()[1:-1]]
    assert named in verified and verified == [
        count for count in (2, 3, 4) if abs(count - named) <= 1
    ]


def test_a_rendezvous_message_is_detected_on_the_receivers_side():
    """Ranks as threads send nothing eagerly, of any length."""
    for length in (1, 70_000):
        found = run_ranks(
            2, lambda transport, length=length: way(transport, np.ones(length), 0, 1, 1)
        )
        assert found[0] == MessageTime(0.0, 0.0) and not found[1].is_eager and found[1].seconds >= 0


def test_what_other_work_spoilt_is_marked_and_no_count_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        measuring, "FAR", 0.5
    )  # so that every median is too far from the fastest pass
    monkeypatch.setattr(turns, "FAR", 0.5)
    run_ranks(2, plan, partial(configured, None, TINY), (1, 2), tmp_path / "found.json")
    text = capsys.readouterr().out
    assert (
        "Set batch.micro_batches" not in text
        and "<- best" not in text
        and "measured best" not in text
    )
    assert "No count can be" in text
    found = json.loads((tmp_path / "found.json").read_text())
    assert all(row["is_spoilt"] for row in found["header"]["micro_batches"])
    table = text.partition("micro-batches  rows")[2].split("\n\n")[0].splitlines()[1:]
    assert len(table) >= 4 and all("~" in line for line in table[:4])


@pytest.mark.parametrize(
    "ranks, settings, law",
    [
        (
            1,
            ["layout.pp=1"],
            "A model on one stage has no bubble that micro-batches would fill, but layout.pp is 1.",
        ),
        (
            2,
            ["layout.pp=2", "batch.size=1"],
            "Each of dp 1 x micro-batches 2 = 2 shares needs a sequence",
        ),
        (3, ["layout.pp=2"], "dp 1 x tp 1 x pp 2 needs 2 ranks, but 3 were started."),
        (2, ["layout.pp=2", "pipeline.schedule=2f2b"], "'2f2b' is neither."),
    ],
)
def test_no_choice_of_micro_batches_is_refused_before_measuring(ranks, settings, law, capsys):
    with pytest.raises(ConfigError) as caught:
        run_ranks(ranks, plan, partial(configured, None, [*TINY, *settings]), (1, 1), None)
    assert caught.value.agreed and law in caught.value.law and capsys.readouterr().out == ""


def test_the_old_word_has_the_options_of_plan_batch_and_is_not_listed():
    old, new = (
        CliRunner().invoke(commands, ["plan", word, "--help"]).output.partition("Options:")[2]
        for word in ("micro-batches", "batch")
    )
    options = ("dp", "tp", "pp", "most", "seconds", "verify", "json", "set")
    assert old == new and all(f"--{name} " in old for name in options)
    assert "micro-batches" not in CliRunner().invoke(commands, ["plan", "--help"]).output


def test_the_job_that_proves_bubbles_runs(monkeypatch, capsys):
    """On threads, shortened; whether it finds what it claims is asked where times may be."""
    folder = Path(__file__).parents[3] / "jobs/prove"
    monkeypatch.syspath_prepend(str(folder))
    bubbles = importlib.import_module("bubbles")
    for name, value in {
        "HALF_S": 0.002,
        "STEPS": 1,
        "MICRO_BATCHES": 2,
        "MESSAGES": {"1 KiB": 256},
    }.items():
        monkeypatch.setattr(bubbles, name, value)
    assert len(set(run_ranks(2, bubbles.main, "2", "1f1b zb-v"))) == 1
    assert len(capsys.readouterr().out.splitlines()) == 4
