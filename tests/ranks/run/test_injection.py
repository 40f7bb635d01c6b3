"""Artificial failures of runs on threads: each happens once, at its point, and leaves other runs alone."""

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpitrain.config import parse, with_settings
from mpitrain.errors import CommError, MpitrainError, TrainingError
from mpitrain.run.build import build, configured
from mpitrain.run.checkpoint.manifest import newest
from mpitrain.transport.threads import run_ranks
from tests.runs import go, records
from tests.training import TINY
from tests.training import configured as job

RING = ["replication.algorithm=ring"]


@pytest.mark.product
@pytest.mark.parametrize(
    "kind, error, law",
    [
        ("raise", (RuntimeError, MpitrainError), "rank 1"),
        ("oom", MemoryError, "EiB"),
        ("exit", SystemExit, "0"),
        ("deadlock", CommError, r"recv from rank 1, tag 16383(.|\n)*recv from rank 0, tag 16383"),
        ("mismatch", CommError, "rank"),
        ("lose", CommError, "rank 0(.|\n)*recv from rank 1"),
    ],
)
@pytest.mark.parametrize("point", ["@0", "@2", "@2:save", "@2:evaluation"])
def test_a_failure_ends_a_run_at_each_point(kind, error, law, point, book, tmp_path, capfd):
    settings = [*book, *RING, f"run.inject={kind}:1{point}", "checkpoint.every=2"]
    with pytest.raises(error, match=law):
        go(2, [*settings, "run.eval_every=2"])
    where = "the start" if point == "@0" else " of ".join([*point.split(":")[1:], "step 2"])
    assert len(re.findall(f"rank 1: run.inject: {kind} at {where}", capfd.readouterr().err)) == 1


@pytest.mark.parametrize(
    "kind, ranks, error", [("oom", 1, MemoryError), ("raise", 3, (RuntimeError, MpitrainError))]
)
@pytest.mark.parametrize("point", ["snapshot", "thread", "publish"])
def test_a_failure_in_a_save_in_the_background_ends_all_ranks(
    kind, error, ranks, point, book, tmp_path, capfd
):
    rank = 0 if point == "publish" else ranks - 1
    settings = [
        *book,
        "checkpoint.every=2",
        "checkpoint.background=true",
        "run.steps=400",
        "run.delay=0:10",  # Else a step leaves the threads no time on one core.
        f"run.inject={kind}:{rank}@3:{point}",
    ]
    with pytest.raises(error):
        go(ranks, settings)
    assert f"rank {rank}: run.inject: {kind} at {point} of step" in capfd.readouterr().err
    saved = [one["step"] for one in records(tmp_path) if one.get("event") == "checkpoint"]
    assert saved == [2] and newest(tmp_path / "run/checkpoints").name == "step-00000002"
    settings[-1] = "run.steps=6"
    go(ranks, settings, "yes")
    names = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert names <= {"step-00000002", "step-00000004", "step-00000006"}


@pytest.mark.parametrize("point", ["forward", "backward", "end"])
def test_a_failure_happens_within_a_pass_and_at_the_end(point, book, capfd):
    with pytest.raises(RuntimeError, match="rank 2"):
        go(3, [*book, f"run.inject=raise:2@3:{point}"])
    assert f"at {point} of step {6 if point == 'end' else 3}" in capfd.readouterr().err


def gradients(*settings, replicas=2):
    """Every rank's gradients after each of three steps, and its losses."""

    def steps(transport):
        config = job(*TINY, "optimizer.clip=0", "run.on_nonfinite=skip", *settings)
        trainer, source, _ = build(transport, config)
        found = []
        for index in range(3):
            rows = trainer.share()
            batch = source.batch(config.run.seed, index, config.batch.size, rows)
            trainer.step(index, *batch)
            found.append(trainer.gradients.copy())
        return found

    return run_ranks(replicas, steps)


@pytest.mark.parametrize("zero", [0, 2])
def test_nan_reaches_the_summed_gradient_of_its_step_alone(zero):
    steps = gradients("run.inject=nan:1@2", f"replication.zero={zero}")
    counts = [sum(int(np.isnan(rank[step]).sum()) for rank in steps) for step in range(3)]
    assert counts == [0, 1 if zero else 2, 0]


def test_a_flipped_bit_changes_one_element_by_a_factor_of_two():
    ring = ["replication.algorithm=ring", "precision.compute=float64"]
    alone = gradients(*ring, "run.inject=bitflip:0@2", replicas=1)[0]
    whole = gradients(*ring, replicas=1)[0]
    assert np.array_equal(alone[0], whole[0])
    (changed,) = np.flatnonzero(alone[1] != whole[1])
    assert alone[1][changed] / whole[1][changed] in (0.5, 2)


@pytest.mark.parametrize(
    "step, settings",
    [
        (2, ()),
        (2, ("layout.pp=2", "pipeline.schedule=async-2bw")),
        (3, ("replication.mode=local", "replication.period=3")),
    ],
)
def test_a_nonfinite_gradient_ends_the_run_by_default(step, settings, book, tmp_path):
    """With local SGD at the end of the period, where all ranks learn of it."""
    with pytest.raises(TrainingError):
        go(2, [*book, "run.inject=nan:1@2", *settings])
    assert records(tmp_path)[-1] == records(tmp_path)[-1] | {"event": "failed", "step": step}


def test_a_run_without_injection_imports_none_of_it(book, tmp_path):
    code = (
        "import sys\nfrom mpitrain.cli import main\n"
        f"try: main(['train', *{[word for s in book for word in ('--set', s)]!r}])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not [name for name in sys.modules if 'run.injection' in name]\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_other_programs_that_open_a_run_do_not_fail(book, tmp_path):
    with pytest.raises(RuntimeError):
        go(2, [*book, "checkpoint.every=1", "run.inject=raise:1@3"])
    assert configured(tmp_path / "run", []).run.inject == ""
    assert parse(with_settings({}, book)).run.inject == ""


def test_a_kill_at_each_point_of_a_save_in_the_background_leaves_whole_checkpoints(tmp_path):
    """Three of the kills of jobs/prove/save-kills.py, of one process; it looks at more ranks, and at losses."""
    job = Path(__file__).parents[3] / "jobs/prove/save-kills.py"
    spec = importlib.util.spec_from_file_location("save_kills", job)
    kills = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kills)
    folder, newest_step = tmp_path / "run", 0
    for point, step in (("snapshot", 3), ("thread", 7), ("publish", 13)):
        assert kills.train(folder, 1, f"kill:0@{step}:{point}") == -signal.SIGKILL
        before, newest_step = newest_step, max([0, *map(number, kills.saved(folder))])
        assert newest_step >= before
    assert kills.train(folder, 1) == 0
    names = {path.name for path in kills.saved(folder)}
    assert {path.name for path in (folder / "checkpoints").iterdir()} == names


def number(path):
    return int(path.name[-8:])
