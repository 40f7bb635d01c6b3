"""Trainers of other projects over backend "mpitrain", as they are: 20 steps as over gloo. One start for all."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import WRITES, python_ranks, rows_of_ranks, run

torch = pytest.importorskip("torch", reason="backend mpitrain needs PyTorch")

EQUAL = Path(__file__).parents[2] / "jobs/prove/torch-equal.py"
TRAINERS = {
    "trainer": "transformers",
    "accelerated": "accelerate",
    "lightning": "pytorch_lightning",
}
HERE = [name for name, package in TRAINERS.items() if find_spec(package)]
PROGRAM = f"""
import importlib.util, json
from pathlib import Path
from mpi4py import MPI
import mpitrain.torch

spec = importlib.util.spec_from_file_location("equal", {str(EQUAL)!r})
equal = importlib.util.module_from_spec(spec)
spec.loader.exec_module(equal)
world, work = MPI.COMM_WORLD, {{name: equal.TRAININGS[name] for name in {HERE!r}}}
for found in equal.compare(work, str(Path("store").resolve()), world.rank, world.size).items():
    says(world.rank, *found)
"""


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """{trainer: the largest difference from gloo, on each rank}."""
    folder = tmp_path_factory.mktemp("trainers")
    done = python_ranks(2, WRITES + PROGRAM, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = rows_of_ranks(folder)
    return {name: [value for _, n, value in lines if n == name] for _, name, _ in lines}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_of_another_project_computes_as_over_gloo(name, request):
    if name not in HERE:
        pytest.skip(f"it needs {TRAINERS[name]}")
    differences = request.getfixturevalue("apart")[name]
    assert len(differences) == 2 and max(differences) <= 1e-6


def test_accelerate_launch_of_several_processes_is_refused(tmp_path):
    code = "import torch.distributed as dist, mpitrain.torch; dist.init_process_group('mpitrain')"
    asked = {**os.environ, "ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}
    done = run([sys.executable, "-c", code], cwd=tmp_path, env=asked)
    assert done.returncode == 2 and "mpitrain launch -n 4" in done.stderr, done
    assert 'File "<string>", line 1, in <module>' in done.stderr
