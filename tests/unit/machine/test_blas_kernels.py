"""The kernels of OpenBLAS are chosen once, before NumPy is imported, and only where that is sure."""

import json
import os
import subprocess
import sys

import pytest

from mpitrain.machine import blas_kernels, process
from mpitrain.machine.blas_kernels import AVX2, Measured


@pytest.mark.parametrize(
    "pairs, kernels, gain",
    [
        ([(2.0, 1.9), (2.01, 1.91)], AVX2, 1.053),
        ([(2.0, 1.96), (2.01, 1.96)], "", 1.02),
        ([(2.0, 2.5), (2.01, 2.5)], "", 0.8),
        ([(4.1, 1.91), (2.0, 1.9), (2.01, 3.8)], AVX2, 1.053),
        ([(2.0, 1.0), (2.1, 1.0)], "", 0),
        ([(2.0, 1.0), (2.0, 1.1)], "", 0),
        ([(float("inf"), 1.0)] * 2, "", 0),
        ([(float("nan"), 1.0)] * 2, "", 0),
    ],
)
def test_kernels_are_chosen_from_a_clear_difference_of_equal_measurements(pairs, kernels, gain):
    assert blas_kernels._compared(pairs) == Measured(kernels, gain)
    assert ("busy" in str(Measured(kernels, gain))) == (not gain)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A processor with AVX-512, whose kernels for AVX2 are faster; returns the list of its children."""
    children = []

    def child(kernels):
        children.append(kernels)
        return 1.0 if kernels else 2.0

    found = process.Processor("a processor", "", frozenset(["avx512f"]))
    monkeypatch.setattr(process, "processor", lambda: found)
    monkeypatch.setattr(blas_kernels, "_version", lambda name: "1" if name == "numpy" else "")
    monkeypatch.setattr(blas_kernels, "_child", child)
    monkeypatch.setattr(blas_kernels, "shared_cache_of", lambda what: tmp_path)
    monkeypatch.delenv(process.OPENBLAS_KERNELS, raising=False)
    return children


def chosen():
    """Return the choice, and undo it."""
    return os.environ.pop(process.OPENBLAS_KERNELS, "")


def test_a_machine_is_measured_once_unless_a_user_or_a_run_has_chosen(
    machine, monkeypatch, tmp_path
):
    metrics = tmp_path / "metrics.jsonl"
    for recorded in ("", "SkylakeX"):
        start = {"event": "start", "blas_kernels": [blas_kernels.in_use()[0], recorded]}
        metrics.write_text(json.dumps(start) + "\n{}\n")
        blas_kernels.choose(lambda: blas_kernels.recorded_in(metrics))
        assert chosen() == recorded and not machine
    metrics.write_text('{"event": "start", "blas_kernels": ["another", "SkylakeX"]}\n')
    for text in (metrics.read_text(), "", "{}", "[]", '{"blas_kernels": 1}'):
        metrics.write_text(text)
        blas_kernels.choose(lambda: blas_kernels.recorded_in(metrics))
        assert chosen() == AVX2 and machine == ["", AVX2] * 3
    assert blas_kernels.measured(anew=True) == Measured(AVX2, 2.0) and len(machine) == 12
    monkeypatch.setenv(process.OPENBLAS_KERNELS, "Zen")
    blas_kernels.choose()
    assert chosen() == "Zen" and len(machine) == 12


def test_nothing_is_measured_with_mkl_or_where_no_start_would_remember_it(machine, monkeypatch):
    monkeypatch.setattr(blas_kernels, "shared_cache_of", lambda what: None)
    blas_kernels.choose()
    monkeypatch.setattr(blas_kernels, "_version", lambda name: "2026")
    blas_kernels.choose()
    assert not machine and not chosen()


@pytest.mark.slow
def test_a_child_measures_with_the_kernels_that_it_is_told():
    code = "import sys, mpitrain.cli.session; print(repr('numpy' in sys.modules))"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert 0 < blas_kernels._child(AVX2) < 10
