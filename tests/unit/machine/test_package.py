"""The digest of the package's own sources, by which ranks and nodes compare their code."""

import os
import shutil
from pathlib import Path

import pytest

import mpitrain
from mpitrain.machine import process


@pytest.fixture
def copy(tmp_path):
    """A copy of the package elsewhere, later and without compiled files."""
    ignored = shutil.ignore_patterns("__pycache__", "*.png")
    return shutil.copytree(
        Path(mpitrain.__file__).parent,
        tmp_path / "mpitrain",
        ignore=ignored,
        copy_function=shutil.copy,
    )


def of(folder, monkeypatch):
    monkeypatch.setattr(process, "__file__", str(folder / "machine/process.py"))
    return process.package.__wrapped__()


def test_a_copy_has_the_same_digest_and_one_changed_line_another(copy, monkeypatch):
    assert of(copy, monkeypatch) == process.package()
    (copy / "pipeline/__pycache__").mkdir()
    (copy / "pipeline/__pycache__/schedules.cpython-311.pyc").touch()
    assert of(copy, monkeypatch) == process.package()
    (copy / "pipeline/.#schedules.py").symlink_to("nobody@nowhere.1")
    (copy / ".ipynb_checkpoints").mkdir()
    (copy / ".ipynb_checkpoints/errors-checkpoint.py").touch()
    assert of(copy, monkeypatch) == process.package()
    for name in ("pipeline/schedules.py", "kernels/gemm.cu"):
        with open(copy / name, "a") as file:
            file.write("\n")
        changed = of(copy, monkeypatch)
        assert changed != process.package() and changed.startswith(mpitrain.__version__)
        os.truncate(copy / name, os.path.getsize(copy / name) - 1)
    (copy / "pipeline/schedules.py").rename(copy / "pipeline/other.py")
    assert of(copy, monkeypatch) != process.package()
