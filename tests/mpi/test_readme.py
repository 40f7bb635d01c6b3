"""The README's Python runs as it stands."""

import re
import sys
from pathlib import Path

import pytest

from tests.processes import run

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_python_of_the_readme_runs_ranks_as_threads(tmp_path):
    (tmp_path / "threads.py").write_text(re.search(r"<!-- threads -->\n```python\n(.*?)```", README, re.S).group(1))
    done = run([sys.executable, "threads.py"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[1.5 1.5 1.5]\n"), done.stderr


@pytest.mark.parametrize("ranks", (1, 3))
def test_the_python_of_the_readme_reduces_and_trains(ranks, tmp_path):
    (tmp_path / "own.py").write_text(re.search(r"<!-- python -->\n```python\n(.*?)```", README, re.S).group(1))
    done = run(["mpirun", "-n", ranks, sys.executable, "own.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    array, loss = re.fullmatch(r"\[(.*)\] loss (.*)\n", done.stdout).groups()
    assert [float(x) for x in array.split()] == [ranks * (ranks + 1) / 2] * 5
    assert float(loss) < 0.2
