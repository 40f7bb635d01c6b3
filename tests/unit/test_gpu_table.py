"""jobs/gpu-table.sh: what its table makes of results, and that it runs where there is no GPU."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from mpitrain.machine.process import gpus
from tests.processes import run

pytestmark = pytest.mark.compile

JOBS = Path(__file__).parents[2] / "jobs"
PRODUCT = {"product": "NT", "m": 4096, "n": 4096, "k": 4096, "dtype": "float32", "time_us": 100.0, "library_us": 95.0, "wrong": 0}
SIDES = [{"name": "mpitrain", "blocks": [0.1, 0.2, 0.1], "losses": [2.0]},
         {"name": "torch", "blocks": [0.2] * 3, "losses": [2.0]}]
RING = {"seconds": 1e-3, "wrong": 0, "bytes": 4_000_000, "ranks": 2}


def kernel(name, rate, peer_us=None, wrong=0):
    return {"name": name, "time_us": 10.0, "rate": rate, "peer_us": peer_us, "wrong": wrong}


@pytest.fixture
def table(tmp_path, capsys):
    """Writes what differs from a good run, and returns (exit code, lines by how they begin)."""
    spec = importlib.util.spec_from_file_location("gpu_table", JOBS / "gpu/table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(device="cuda", tests="31 passed, 1 skipped in 9.1s", rule="=== {} ===", early=(), **changed):
        rows = [kernel("copy", 100.0), kernel("adamw", 90.0), kernel("attention float32", 1, 8.0)]
        good = {"gemm": {"rows": [PRODUCT]}, "kernels": {"rows": rows}, "train": {"sides": SIDES},
                "train-library": {"sides": SIDES}, "ring-yes": RING, "ring-no": RING}
        (tmp_path / "tests.log").write_text(f"..s\n{rule.format(tests)}\n")
        for name in early:
            (tmp_path / f"{name}.failed").write_text("ended with exit code 1\n")
            (tmp_path / f"{name}.log").write_text("a row\nCUDARuntimeError: out of memory\n")
        for name, content in (good | {name.replace("_", "-"): content for name, content in changed.items()}).items():
            (tmp_path / f"{name}.json").write_text("" if content is None else json.dumps(content))
        code = module.main(tmp_path, device)
        return code, capsys.readouterr().out.splitlines()

    return run


def line(lines, start):
    found, = (line for line in lines if line.startswith(start))
    return found


def test_a_run_that_has_what_is_required_is_a_success(table):
    code, lines = table()
    assert code == 0 and lines[-1] == "8 lines, 0 of them short of what is required, or failed"
    assert line(lines, "NT 4096x4096x4096 float32 against library").split()[-4:] == ["95.0", "us", "0.95", "0.90"]
    assert line(lines, "adamw against a copy").split()[-2:] == ["0.90", "0.85"]
    assert line(lines, "attention float32").split()[-2:] == ["0.80", "0.50"]
    assert line(lines, "training step of a GPT, float32, products by our kernels").split()[-2:] == ["2.00", "-"]
    assert "4.00 GB/s bus bandwidth, 0 wrong" in line(lines, "ring all-reduce of 2 ranks, device.cuda_aware = no")


@pytest.mark.parametrize(("changed", "start", "end"), [
    ({"gemm": {"rows": [PRODUCT | {"time_us": 120.0}]}}, "NT 4096", "short"),
    ({"gemm": {"rows": [PRODUCT | {"product": "NT+gelu"}]}}, "NT 4096x4096x4096 float32 + bias + GELU", "short"),
    ({"gemm": {"rows": [PRODUCT | {"wrong": 3}]}}, "NT 4096", "failed"), ({"gemm": None}, "products: was not run", "failed"),
    ({"kernels": {"rows": [kernel("copy", 100.0), kernel("adamw", 84.0)]}}, "adamw", "short"),
    ({"train": {"sides": [SIDES[0], SIDES[1] | {"losses": [2.1]}]}}, "training step of a GPT, float32, products by o", "failed"),
    ({"ring_no": RING | {"wrong": 1}}, "ring all-reduce of 2 ranks, device.cuda_aware = no", "failed"),
    ({"tests": "1 failed, 31 passed in 9.1s"}, "tests marked gpu", "failed"),
    ({"tests": "30 passed, 2 errors in 9.1s"}, "tests marked gpu", "failed"),
    ({"tests": "32 skipped in 0.1s"}, "tests marked gpu", "failed"),
])
def test_what_is_wrong_missing_or_slow_is_marked_and_fails(changed, start, end, table):
    code, lines = table(**changed)
    assert code == 1 and line(lines, start).endswith(end)
    assert lines[-1].startswith("8 lines, 1 of") or "kernels" in changed


@pytest.mark.parametrize("name", ["gemm", "kernels"])
def test_rows_of_a_benchmark_that_ended_early_are_not_taken_for_all(name, table):
    code, lines = table(early=[name])
    assert code == 1 and "CUDARuntimeError: out of memory" in line(lines, f"{name} ended early")


@pytest.mark.parametrize("rule", ["{}", "=== {} ==="])    # pytest -q draws none, unless something makes it talk more
@pytest.mark.parametrize("tests", ["31 passed, 1 warning in 9.1s", "31 passed, 3 deselected, 2 warnings in 71.12s (0:01:11)"])
def test_warnings_are_no_failures_and_the_summary_needs_no_rule(rule, tests, table):
    code, lines = table(tests=tests, rule=rule)
    assert code == 0 and tests in line(lines, "tests marked gpu")


def test_elsewhere_nothing_is_too_slow(table):
    assert table("cuda-sim", gemm={"rows": [PRODUCT | {"time_us": 1e6}]}, tests="32 skipped in 1.0s")[0] == 0


def job(*words, folder):
    paths = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return run(["bash", JOBS / "gpu-table.sh", *words, folder], env={**os.environ, **paths})


@pytest.mark.skipif(gpus() > 0, reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = job("cuda", folder=tmp_path)
    assert done.returncode == 2 and "CuPy finds no GPU here: install mpitrain[cuda13]" in done.stdout.splitlines()[-1]


def test_all_of_it_runs_in_the_simulator(tmp_path):
    done = job("cuda-sim", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].endswith("lines, 0 of them short of what is required, or failed") and len(lines) > 35, done.stdout
