"""The README's Python runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.parametrize("ranks", (1, 3))
def test_the_python_of_the_readme_reduces_and_trains(ranks, tmp_path):
    (tmp_path / "own.py").write_text(re.search(r"<!-- python -->\n```python\n(.*?)```", README, re.S).group(1))
    done = subprocess.run(["mpirun", "-n", str(ranks), sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stderr
    array, loss = re.fullmatch(r"\[(.*)\] loss (.*)\n", done.stdout).groups()
    assert [float(x) for x in array.split()] == [ranks * (ranks + 1) / 2] * 5
    assert float(loss) < 0.2
