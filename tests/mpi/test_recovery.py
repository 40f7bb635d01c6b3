"""Ranks of a fault-tolerant job that are killed: before they are connected, before the first step, and in a run."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.mpi.test_commands import TINY
from tests.processes import mpitrain, run, sets

JOB = Path(__file__).parents[2] / "jobs/prove/outlive.py"
SEED = 61  # Of a job whose lowest rank dies first.


@pytest.fixture(scope="module", autouse=True)
def open_mpi():
    if "Open MPI" not in run(["mpirun", "--version"]).stdout:
        pytest.skip("only Open MPI has ULFM")


@pytest.mark.parametrize("lost", [(0, 1), (2,)])
def test_ranks_that_die_before_all_are_connected_end_the_others_at_once(lost):
    program = (
        "import os, signal, mpitrain; from mpitrain.machine import process\n"
        f"if process.launched().rank in {lost}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "mpitrain.connect()"
    )
    done = mpitrain("launch", "-n", 3, "--fault-tolerant", "--", "python", "-c", program)
    assert done.returncode not in (0, 2), done.stderr
    # The first death that is seen ends the job, so a rank that dies a moment later may not be named.
    named = {int(rank) for rank in re.findall(r"^rank (\d+): ended on ", done.stderr, re.M)}
    assert named and named <= {*lost}, done.stderr


def test_a_death_before_the_first_step_is_a_restart(tmp_path):
    keys = sets(run__on_failure="continue", run__inject="kill:1@0")
    words = ["train", *TINY, *keys, "--out", str(tmp_path / "run")]
    done = mpitrain("launch", "-n", 2, "--fault-tolerant", "--", *words)
    assert done.returncode == 0 and "starting it again, on 2 ranks" in done.stderr, done.stderr
    assert "done: parameters bitwise equal" in done.stdout


def test_a_spare_takes_the_place_of_rank_0_and_speaks_for_it(tmp_path):
    keys = sets(run__on_failure="continue", run__inject="kill:0@2")
    words = ["train", *TINY, *keys, "--out", str(tmp_path / "run")]
    done = mpitrain("launch", "-n", 3, "--spares", 1, "--fault-tolerant", "--", *words)
    assert done.returncode == 0 and "starting it again" not in done.stderr, done.stderr
    assert "spares take the place of rank 0, and 0 wait; 2 go on" in done.stderr
    assert "done: parameters bitwise equal on all ranks" in done.stdout


@pytest.mark.slow
def test_a_launched_run_outlives_its_rank_0_and_a_second_rank(tmp_path):
    spec = importlib.util.spec_from_file_location("outlive", JOB)
    outlive = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(outlive)
    settings = {"run.steps": 40, "run.delay": "random:60:1"}
    is_good, is_in_place, kills, text = outlive.job(SEED, tmp_path, **settings)
    assert is_good and is_in_place and len(kills) == 2 and "-> [(" in text, text
