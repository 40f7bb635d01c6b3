"""The trace of a run of which a rank was killed."""

import re

from tests.mpi.test_commands import TINY, python_ranks
from tests.processes import mpitrain


def test_after_a_kill_report_prints_the_last_action_of_each_rank(tmp_path):
    code = (
        "import os, signal; from mpi4py import MPI; from mpitrain.ops import host\n"
        "from mpitrain.parallel.replica import Replica\n"
        "update = Replica.apply\n"
        "def apply(self, scale, lr, step):\n"
        "    if step == 5 and MPI.COMM_WORLD.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    update(self, scale, lr, step)\n"
        "Replica.apply = apply\n"
        f"from mpitrain.cli import main; main(['train', '--out', 'run', *{TINY!r}])"
    )
    done = python_ranks(2, code, tmp_path)
    assert done.returncode != 0
    said = mpitrain("report", "run", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "run: It has not" in said.stdout and "2 to 4" in said.stdout
    assert re.search(
        r"rank 1 on \S+, [\d.]+ s before: step 5, update of the parameters", said.stdout
    ), said.stdout
    assert re.search(r"rank 0 on \S+, [\d.]+ s before: step 6, .*waiting for ", said.stdout), (
        said.stdout
    )
    assert "was rank 1." in said.stdout
