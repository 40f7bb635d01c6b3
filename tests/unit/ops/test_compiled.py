"""Compiled passes: the definitions of operations in float32 and float64, the host's bodies for arrays with gaps."""

import os
from functools import partial

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.machine import compiling
from mpitrain.machine.backend import Arena, HostBackend
from mpitrain.ops.device import device_for, host_ops, reference_ops
from mpitrain.ops.host import compiled
from mpitrain.run.job import agree_on
from mpitrain.transport.threads import run_ranks
from tests.laws.operations import OperationLaws
from tests.laws.transport import laws_of
from tests.training import configured

pytestmark = pytest.mark.compile

host = host_ops()


@pytest.fixture(scope="module")
def ops():
    return host_ops(passes="compiled")


def drawn(seed, *shape, dtype="f4"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def assert_close(found, truth, tolerance):
    assert found.shape == truth.shape
    error = np.abs(found - truth).max(initial=0)
    assert error <= tolerance * max(np.abs(truth).max(initial=0), 1e-3)


@pytest.mark.parametrize("law", laws_of(OperationLaws))
def test_operations_with_compiled_passes_obey(ops, law):
    changed = {name for name, body in vars(ops).items() if isinstance(body, partial)}
    assert changed == {name for name, body in vars(host).items() if isinstance(body, partial)}
    getattr(OperationLaws(changed), law)(ops, HostBackend())


@pytest.mark.parametrize("c", [37, 48])
def test_rows_have_the_same_bits_in_any_batch(ops, c):
    x, gain, bias, w = drawn(1, 300, c), drawn(2, c), drawn(3, c), drawn(4, 41, c)
    for first, count in ((0, 300), (17, 1), (100, 131)):
        rows = slice(first, first + count)
        normal = ops.layer_norm(x[rows], gain, bias, 1e-5, Arena())[0]
        assert np.array_equal(normal, ops.layer_norm(x, gain, bias, 1e-5, Arena())[0][rows])
        z = np.ascontiguousarray(x @ w.T)
        y, slope = ops.gelu(z[rows].copy(), Arena())
        every_y, every_slope = ops.gelu(z.copy(), Arena())
        assert np.array_equal(y, every_y[rows]) and np.array_equal(slope, every_slope[rows])


def test_gelu_reaches_its_limits_and_passes_nan_on(ops):
    z = np.float32([-1e4, -100, -20, 0, 20, 100, 1e4, np.nan]).reshape(1, -1)
    y, slope = ops.gelu(z.copy(), Arena())
    true_y, true_slope = host.gelu(z.copy(), Arena())
    np.testing.assert_allclose(y, true_y, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(slope, true_slope, rtol=1e-6, atol=1e-6)
    assert np.isnan(y[0, -1]) and np.isnan(slope[0, -1])
    dense = np.linspace(-12, 12, 100_001, dtype="f4").reshape(1, -1)
    wide = dense.astype("f8")
    true_y, _ = reference_ops().gelu(wide, None)
    assert np.abs(ops.gelu(dense.copy(), Arena())[0] - true_y).max() <= 2e-6
    assert np.abs(ops.gelu(wide.copy(), Arena())[0] - true_y).max() <= 4e-15


def test_arrays_with_gaps_go_to_the_host_s_bodies(ops):
    for dtype in ("f4", "f8"):
        x = drawn(1, 5, 16, dtype=dtype)[:, ::2]
        gain, bias, w = (
            drawn(seed, *shape, dtype=x.dtype) for seed, *shape in ((2, 8), (3, 8), (4, 6, 8))
        )
        for name, arguments in (
            ("layer_norm", (gain, bias, 1e-5)),
            ("linear_gelu", (w, None)),
            ("gelu", ()),
        ):
            own, truth = (
                getattr(one, name)(x.copy("K"), *arguments, Arena())[0] for one in (ops, host)
            )
            assert np.allclose(own, truth, rtol=1e-5, atol=1e-6) and own.dtype == x.dtype


def test_compiled_passes_are_refused_without_a_compiler(no_compiler):
    compiled.library.cache_clear()
    with pytest.raises(ConfigError, match="no g\\+\\+ here") as caught:
        device_for("cpu", passes="compiled")
    assert "device.passes" in str(caught.value)


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Return a function that makes g++ these lines of a shell, and one that counts its compilations."""

    def clear():
        for cached in (compiled.library, compiling.processor_and_compiler):
            cached.cache_clear()

    def replace(lines):
        clear()
        if not lines:
            return
        (tmp_path / "g++").write_text(f"#!/bin/sh\necho $1 >> {tmp_path}/calls\n{lines}\n")
        (tmp_path / "g++").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield replace, lambda: (tmp_path / "calls").read_text().count("-O3")
    clear()


def passes_of(ranks, recorded="auto"):
    """Return the device.passes on which ranks agree at a start."""

    def agreed(transport):
        config = configured("device.kind=cpu")
        return agree_on(transport, lambda: config, lambda config: {"passes": recorded})

    return [job.config.device.passes for job in run_ranks(ranks, agreed)]


@pytest.mark.parametrize(
    "lines, reason",
    [
        ("exit 3", "cannot compile passes.cpp: it ended with exit code 3"),
        ("printf 'o\\377ps' >&2; exit 1", "cannot compile passes.cpp: o\ufffdps"),
        ("kill -9 $$", "cannot compile passes.cpp: signal 9 ended it"),
        ("exit", "wrote nothing for passes.cpp"),
        ('while [ "$1" != -o ]; do shift; done; : > $2', "cannot be loaded"),
    ],
)
def test_a_compiler_that_fails_costs_one_note_with_the_reason(
    lines, reason, compiler, capsys, tmp_path
):
    """Of all ranks and starts one has tried to compile."""
    replace, compiled_times = compiler
    for start in (lines, ""):
        replace(start)
        assert passes_of(3) == ["numpy"] * 3
        notes = [line for line in capsys.readouterr().err.splitlines() if "note: " in line]
        assert len(notes) == 1 and reason in notes[0] and "On rank 0" in notes[0]
        assert "NumPy's passes" in notes[0] and compiled_times() == 1
        (refusal,) = tmp_path.glob("cache/mpitrain/passes/*.failed")
        assert f"remove {refusal} to try again" in notes[0]
    assert passes_of(1, "numpy") == ["numpy"] and not capsys.readouterr().err


def test_a_compiler_that_hangs_has_failed(compiler, monkeypatch):
    replace, _ = compiler
    monkeypatch.setattr(compiled, "COMPILING", 0.2)
    replace("sleep 60")
    assert "did not end within 0.2 s" in compiled.lacks("float32")


def test_a_refusal_is_forgotten_after_a_day(compiler, tmp_path):
    replace, compiled_times = compiler
    replace("exit 1")
    for compilations in (1, 2):
        for _ in range(2):
            compiled.library.cache_clear()
            assert "cannot compile" in compiled.lacks("float32")
            assert compiled_times() == compilations
        (refusal,) = tmp_path.glob("cache/mpitrain/passes/*.failed")
        os.utime(refusal, times=(0, refusal.stat().st_mtime - compiled.REMEMBERED))


@pytest.mark.parametrize(
    "given, able, recorded, chosen",
    [
        ("auto", (True, True, True), "auto", "compiled"),
        ("auto", (True, False, True), "auto", "numpy"),
        ("auto", (False, False, False), "compiled", "compiled"),
        ("auto", (True, True, True), "numpy", "numpy"),
        ("numpy", (True, True, True), "compiled", "numpy"),
    ],
)
def test_ranks_agree_on_passes_and_a_resume_keeps_them(monkeypatch, given, able, recorded, chosen):
    def passes(transport):
        config = configured("device.kind=cpu", f"device.passes={given}")
        return agree_on(
            transport, lambda: config, lambda config: {"passes": recorded}
        ).config.device.passes

    answers = list(able)
    monkeypatch.setattr(
        compiled, "lacks", lambda stored: "" if answers.pop() else compiling.NO_COMPILER
    )
    assert run_ranks(3, passes) == [chosen] * 3
