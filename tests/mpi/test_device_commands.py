"""`--device` as a user types it: what is missing, what `auto` became, and kernels that train on the simulator."""

import os
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.mpi.test_commands import TINY, losses
from tests.processes import SECONDS, calls_of_one_start, mpitrain, sets

ROOT = Path(__file__).parents[2]
NO_DRIVER = f"""
import sys; sys.path.append({str(ROOT)!r})
from tests.fakes.cupy import *
from tests.fakes.cupy import __version__, devices
devices.count = None
"""
FEW = [*TINY, *sets(run__steps=1)]


def test_cuda_without_cupy_is_one_message_and_exit_2(tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('No module named cupy')")
    done = mpitrain("train", "--device", "cuda", "--out", "run", *TINY, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("ConfigError") == 1, done.stderr
    assert "device.kind cuda needs CuPy, but it cannot be imported" in done.stderr
    assert "use --device cpu" in done.stderr and "Traceback" not in done.stderr


def test_without_a_driver_cuda_is_one_message_and_auto_is_resolved_in_the_run_directory(tmp_path):
    (tmp_path / "cupy.py").write_text(NO_DRIVER)
    cuda = ["train", "--device", "cuda", "--out", "cuda", *FEW]
    calls = [cuda, [*cuda, *sets(replication__wire="topk:0.1")], ["train", "--out", "run", *FEW]]
    said, _ = calls_of_one_start(2, calls, tmp_path, [2, 2, 0])
    complaints = (
        "needs a GPU and its driver, but CuPy fake says cudaErrorInsufficientDriver",
        "Wire format topk:0.1 keeps its residuals in host memory",
    )
    for complaint, text in zip(complaints, said, strict=False):
        assert text.count("ConfigError") == text.count(complaint) == 1, text
        assert "Traceback" not in text
    assert "use --device cpu" in said[0] and not (tmp_path / "cuda").exists()
    device = tomllib.loads((tmp_path / "run/config.toml").read_text())["device"]
    assert device.pop("passes") in ("compiled", "numpy")
    assert device == {
        "kind": "cpu",
        "cuda_aware": "auto",
        "gemm": "tiled",
        "graph": "no",
        "tensor_cores": "mma",
        "tiles": "",
    }


def test_cuda_sim_without_a_compiler_is_refused_with_exit_2(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "ziglang.py").touch()  # in place of a package with a compiler
    for program in ("orted", "prted", "prterun"):
        if found := shutil.which(program):
            (tmp_path / "bin" / program).symlink_to(found)
    done = mpitrain(
        "train",
        "--device",
        "cuda-sim",
        *TINY,
        cwd=tmp_path,
        env={**os.environ, "PATH": str(tmp_path / "bin"), "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 2 and "there is no g++" in done.stderr, done.stderr


@pytest.mark.timeout(5 * SECONDS)  # on a fresh machine g++ has the kernels to build
@pytest.mark.compile
def test_the_simulator_trains_as_the_cpu_and_a_run_may_change_device(tmp_path):
    few = [*TINY, *sets(run__steps=5, replication__algorithm="ring", replication__wire="fp16")]
    resume = ["train", "--out", "cuda-sim", "--resume", "--device", "cpu", *sets(run__steps=7)]
    calls = [
        *(["train", "--device", kind, "--out", kind, *few] for kind in ("cpu", "cuda-sim")),
        ["train", "--device", "cuda-sim", "--gemm", "library", "--out", "library", *FEW],
        ["eval", "cpu", "--rows", "20"],
        ["eval", "cpu", "--device", "auto", "--rows", "20"],
    ]
    _, (*_, own, auto) = calls_of_one_start(2, calls, tmp_path, code=0)
    one, other = losses(tmp_path / "cpu"), losses(tmp_path / "cuda-sim")
    assert one.keys() == other.keys() == set(range(1, 6))
    assert all(abs(other[step][0] / one[step][0] - 1) <= 1e-4 for step in one)
    assert one[5][0] < one[1][0]
    for run, gemm in (("cuda-sim", "tiled"), ("library", "library")):
        device = tomllib.loads((tmp_path / run / "config.toml").read_text())["device"]
        assert (device["kind"], device["gemm"]) == ("cuda-sim", gemm)
    assert own == auto and "validation loss" in own
    went_on = mpitrain(*resume, cwd=tmp_path)
    assert went_on.returncode == 0, went_on.stderr
