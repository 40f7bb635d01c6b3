"""A job of jobs/prove/outlive.py: rank 0 is killed, and at once another rank; the rest ends the run."""

import importlib.util
from pathlib import Path

import pytest

from tests.processes import run

JOB = Path(__file__).parents[2] / "jobs/prove/outlive.py"
SEED = 61  # Of a job whose lowest rank dies first.


@pytest.mark.slow
def test_a_launched_run_outlives_its_rank_0_and_a_second_rank(tmp_path):
    if "Open MPI" not in run(["mpirun", "--version"]).stdout:
        pytest.skip("only Open MPI has ULFM")
    spec = importlib.util.spec_from_file_location("outlive", JOB)
    outlive = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(outlive)
    settings = {"run.steps": 40, "run.delay": "random:60:1"}
    is_good, is_in_place, kills, text = outlive.job(SEED, tmp_path, **settings)
    assert is_good and is_in_place and len(kills) == 2 and "-> [(" in text, text
