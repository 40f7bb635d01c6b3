"""The Python of the pages runs as it stands, and programs of users end together."""

import re
import sys
from pathlib import Path

import pytest

from tests.processes import mpitrain, run

HERE = Path(__file__).parents[2]
README = (HERE / "README.md").read_text()
EXTENDING = (HERE / "mpitrain/run/EXTENDING.md").read_text()
COMMAND = r"`mpitrain (launch -n) 2 (-- python own.py)`"


def test_the_python_of_the_page_of_extending_starts_ranks_as_threads(tmp_path):
    (tmp_path / "threads.py").write_text(
        re.search(r"<!-- threads -->\n```python\n(.*?)```", EXTENDING, re.S).group(1)
    )
    done = run([sys.executable, "threads.py"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[1.5 1.5 1.5]\n"), done.stderr


@pytest.mark.parametrize("ranks", (1, 3))
def test_the_python_of_the_page_of_extending_reduces_and_trains(ranks, tmp_path):
    (tmp_path / "own.py").write_text(
        re.search(r"<!-- python -->\n```python\n(.*?)```", EXTENDING, re.S).group(1)
    )
    line, script = re.search(COMMAND, EXTENDING).groups()
    done = mpitrain(*line.split(), ranks, *script.split(), cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    array, loss = re.fullmatch(r"\[(.*)\] loss (.*)\n", done.stdout).groups()
    assert [float(x) for x in array.split()] == [ranks * (ranks + 1) / 2] * 5
    assert float(loss) < 0.2


def test_the_pytorch_loop_of_the_readme_trains_one_model_on_two_ranks(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "own.py").write_text(
        re.search(r"<!-- torch -->\n```python\n(.*?)```", README, re.S).group(1)
    )
    line, script = re.search(COMMAND, README).groups()
    done = mpitrain(*line.split(), 2, *script.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one, other = done.stdout.splitlines()
    assert one == other and all(abs(float(x) - 1) < 0.01 for x in one.strip("[]").split(", "))


@pytest.mark.parametrize(
    "ends, code, said",
    [
        (
            "raise ValueError('planned')",
            1,
            r"rank 1: ended by an exception on \S+\nTraceback .*\n  File \"own.py\", line 3, in <mod"
            r"ule>\n.*ValueError: planned\n",
        ),
        ("raise SystemExit(7)", 7, r".*\b7\b.*"),
    ],
)
def test_a_program_of_which_one_rank_fails_ends_on_all_ranks_with_its_code(
    ends, code, said, tmp_path
):
    program = f"from mpi4py import MPI; rank = MPI.COMM_WORLD.rank\nif rank == 1:\n    {ends}\nMPI.COMM_WORLD.recv(source=1)\n"
    (tmp_path / "own.py").write_text(program)
    done = mpitrain("launch", "-n", 2, "--", "own.py", cwd=tmp_path)
    assert done.returncode == code and re.fullmatch(said, done.stderr, re.DOTALL), done.stderr
