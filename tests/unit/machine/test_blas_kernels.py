"""The kernels of OpenBLAS are chosen once, before NumPy is imported, and only where that is sure."""

import json
import subprocess
import sys

import pytest

from mpitrain.machine import blas_kernels, process
from mpitrain.machine.blas_kernels import AVX2, Measured
from mpitrain.machine.process import MKL

INFINITE, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    "pairs, kernels, gain",
    [
        ([(2.0, 1.9), (2.01, 1.91)], AVX2, 1.053),
        ([(2.0, 1.96), (2.01, 1.96)], "", 1.02),
        ([(2.0, 2.5), (2.01, 2.5)], "", 0.8),
        ([(4.1, 1.91), (2.0, 1.9), (2.01, 3.8)], AVX2, 1.053),
        ([(2.0, 1.0), (2.1, 1.0)], "", 0),
        ([(2.0, 1.0), (2.0, 1.1)], "", 0),
        ([(INFINITE, 1.0)] * 2, "", 0),
        ([(NAN, 1.0)] * 2, "", 0),
    ],
)
def test_kernels_are_chosen_from_a_clear_difference_of_equal_measurements(pairs, kernels, gain):
    """Time is as disturbed as can be: for kernels of one library it does not count."""
    turns = [{"": (own, INFINITE), AVX2: (other, INFINITE)} for own, other in pairs]
    result = blas_kernels._compared(turns)
    assert (result.kernels, result.gains) == (kernels, {AVX2: gain} if gain else {})
    assert ("busy" in str(result)) == (not gain)


@pytest.mark.parametrize(
    "own, avx2, mkl, kernels, gains",
    [
        ((2, 1), (1.9, 1), (1.8, 0.9), MKL, {AVX2: 1.053, MKL: 1.111}),
        ((2, 1), (1.7, 1), (1.8, 0.9), AVX2, {AVX2: 1.176, MKL: 1.111}),
        ((2, 1), (2.5, 1), (1.8, 1.8), "", {AVX2: 0.8, MKL: 0.556}),  # MKL uses one of two threads
        ((2, 1), (2.5, 1), (1.8, INFINITE), "", {AVX2: 0.8}),
        ((2, INFINITE), (1.9, 1), (1.8, 0.9), AVX2, {AVX2: 1.053}),
        ((2, 1), (INFINITE, 1), (1.8, 0.9), MKL, {MKL: 1.111}),
    ],
)
def test_mkl_is_chosen_only_where_it_multiplies_faster_in_time(own, avx2, mkl, kernels, gains):
    result = blas_kernels._compared([{"": own, AVX2: avx2, MKL: mkl}] * 3)
    assert (result.kernels, result.gains) == (kernels, gains)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A processor with AVX-512, whose kernels for AVX2 are faster; returns the list of its children."""
    children = []

    def child(kernels):
        children.append(kernels)
        return (1.0, 1.0) if kernels else (2.0, 2.0)

    processor = process.Processor("a processor", "", frozenset(["avx512f"]))
    monkeypatch.setattr(process, "processor", lambda: processor)
    monkeypatch.setattr(blas_kernels, "_version", lambda name: "1" if name == "numpy" else "")
    monkeypatch.setattr(blas_kernels, "mkl_file", lambda: None)
    monkeypatch.setattr(blas_kernels, "_child", child)
    monkeypatch.setattr(blas_kernels, "shared_cache_of", lambda what: tmp_path)
    for name in (process.OPENBLAS_KERNELS, process.BY_MKL):
        monkeypatch.delenv(name, raising=False)
    return children


def chosen():
    """Return the choice, and undo it."""
    kernels = process.blas_kernels()
    process.choose_blas_kernels("")
    return kernels


def test_a_machine_is_measured_once_unless_a_user_or_a_run_has_chosen(
    machine, monkeypatch, tmp_path
):
    metrics = tmp_path / "metrics.jsonl"
    for recorded in ("", "SkylakeX"):
        start = {"event": "start", "blas_kernels": [process.processor().label, recorded]}
        metrics.write_text(json.dumps(start) + "\n{}\n")
        blas_kernels.choose(lambda: blas_kernels.recorded_in(metrics))
        assert chosen() == recorded and not machine
    metrics.write_text('{"event": "start", "blas_kernels": ["another", "SkylakeX"]}\n')
    for text in (metrics.read_text(), "", "{}", "[]", '{"blas_kernels": 1}'):
        metrics.write_text(text)
        blas_kernels.choose(lambda: blas_kernels.recorded_in(metrics))
        assert chosen() == AVX2 and machine == ["", AVX2] * 3
    assert blas_kernels.measured(anew=True) == Measured(AVX2, {AVX2: 2.0}) and len(machine) == 12
    monkeypatch.setenv(process.OPENBLAS_KERNELS, "Zen")
    blas_kernels.choose()
    assert chosen() == "Zen" and len(machine) == 12


def test_where_mkl_is_installed_it_is_measured_too_and_a_resume_keeps_the_choice(
    machine, monkeypatch, tmp_path
):
    """Installing MKL chooses nothing, and a run that multiplied by it goes on so."""
    monkeypatch.setattr(blas_kernels, "mkl_file", lambda: tmp_path / "libmkl_rt.so")
    monkeypatch.setattr(
        blas_kernels, "_child", lambda kernels: {"": (2, 2), AVX2: (3, 3), MKL: (4, 4)}[kernels]
    )
    blas_kernels.choose()
    assert chosen() == ""
    assert blas_kernels.measured() == Measured("", {AVX2: 0.667, MKL: 0.5})
    blas_kernels.choose(lambda: MKL)
    assert process.blas_kernels() == chosen() == MKL
    monkeypatch.setattr(blas_kernels, "mkl_file", lambda: None)
    blas_kernels.choose(lambda: MKL)
    assert chosen() == ""
    monkeypatch.setenv(process.BY_MKL, "0")
    assert not blas_kernels.is_choice()


@pytest.mark.parametrize(
    "text", ["", "[", "[" * 10**5, "[]", "{}", '["MKL", {}, ""]', '["", {"MKL": 2}, ""]', "\xff"]
)
def test_a_file_that_is_no_measurement_is_measured_again(text, machine, tmp_path):
    blas_kernels.measured()
    (path,) = tmp_path.glob("*.json")
    path.write_text(text)
    assert blas_kernels.measured().kernels == AVX2 and len(machine) == 12
    assert blas_kernels.measured().kernels == AVX2 and len(machine) == 12


def test_nothing_is_measured_where_no_start_would_remember_it(machine, monkeypatch, tmp_path):
    """Each rank would measure at every start, and might choose otherwise."""
    blas_kernels.measured()
    (path,) = tmp_path.glob("*.json")
    path.unlink()
    path.mkdir()
    (path.with_suffix(".json.partial")).mkdir()
    machine.clear()
    for _ in range(2):
        result = blas_kernels.measured()
        assert result.kernels == "" and str(path) in result.reason and not machine
    monkeypatch.setattr(blas_kernels, "shared_cache_of", lambda what: None)
    blas_kernels.choose()
    assert not machine and not chosen()


@pytest.mark.slow
def test_a_child_measures_with_the_kernels_that_it_is_told():
    code = "import sys, mpitrain.cli.session; print(repr('numpy' in sys.modules))"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    work, wall = blas_kernels._child(AVX2)
    assert 0 < work < 10 and wall > 0
