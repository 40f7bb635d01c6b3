"""`mpitrain bench kernels` and `bench gemm`: every row is right, and what is missing is said in one message."""

import sys

import pytest
from click.testing import CliRunner

from mpitrain.cli.bench import command
from mpitrain.kernels.engines import kernels_for
from mpitrain.kernels.simulator import build


def bench(*arguments: str) -> tuple[int, list[list[str]], str]:
    """(exit code, rows as words, everything printed)"""
    done = CliRunner().invoke(command, arguments)
    return done.exit_code, [line.split() for line in done.output.splitlines()[1:]], done.output


def test_every_operation_is_right_in_the_simulator():
    code, rows, _ = bench("kernels", "--device", "cuda-sim")
    assert code == 0
    assert {"copy", "linear", "linear_gelu", "layer_norm", "attention", "cross_entropy_loss", "adamw"} <= {row[0] for row in rows}
    assert {row[-1] for row in rows} == {"0"}


def test_products_are_right_on_the_cpu_and_in_the_simulator():
    for kind in ("cpu", "cuda-sim"):
        code, rows, _ = bench("gemm", "--device", kind, "--sizes", "1,33")
        assert code == 0 and [row[0] for row in rows] == ["1", "33"] and {row[-1] for row in rows} == {"0"}
    assert bench("gemm", "--device", "cuda-sim", "--sizes", "40", "--dtype", "float16")[0] == 0


def test_only_the_simulator_checks():
    code, _, text = bench("kernels", "--checked")
    assert code == 2 and "Use --device cuda-sim --checked." in text


@pytest.mark.parametrize("name", ["kernels", "gemm"])
def test_without_cupy_it_says_what_to_install(name, monkeypatch):
    kernels_for.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    code, _, text = bench(name, "--device", "cuda")
    assert code == 2 and "pip install 'mpitrain[cuda13]'" in text


@pytest.mark.parametrize("name", ["kernels", "gemm"])
def test_without_a_compiler_the_simulator_says_what_to_install(name, monkeypatch):
    for remembered in (kernels_for, build.compiler, build._machine):
        remembered.cache_clear()
    monkeypatch.setattr(build.shutil, "which", lambda program: None)
    code, _, text = bench(name, "--device", "cuda-sim")
    assert code == 2 and "needs g++ 11 or later on x86-64; g++ is not installed" in text
