"""`--device` as a user types it: what is missing, what `auto` became, and kernels that train on the simulator."""

import os
import shutil
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from mpitrain.config import parse, with_settings
from mpitrain.ops.cuda.tiles import TILES, FastestTile, Tiling, write_tiles
from mpitrain.ops.device import device_for
from mpitrain.run.build import build
from mpitrain.transport.mpi import connect
from tests.mpi.test_commands import TINY, losses
from tests.processes import SECONDS, launch, mpitrain, sets

ROOT = Path(__file__).parents[2]
NO_DRIVER = "from tests.fakes.cupy import *\nfrom tests.fakes.cupy import __version__, devices\ndevices.count = None\n"


@pytest.mark.parametrize(
    "cupy, complaint",
    [
        (
            "raise ImportError('No module named cupy')",
            "device.kind cuda needs CuPy, but it cannot be imported",
        ),
        (NO_DRIVER, "needs a GPU and its driver, but CuPy fake says cudaErrorInsufficientDriver"),
    ],
)
def test_cuda_without_a_gpu_is_one_message_and_exit_2(cupy, complaint, tmp_path):
    (tmp_path / "cupy.py").write_text(cupy)
    paths = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = launch(3, "train", "--device", "cuda", "--out", "run", *TINY, cwd=tmp_path, env=paths)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("ConfigError") == 1 and complaint in done.stderr
    assert "use --device cpu" in done.stderr and "Traceback" not in done.stderr


def test_a_wire_format_that_a_gpu_cannot_have_is_one_message_and_exit_2(tmp_path):
    done = launch(
        2,
        "train",
        "--device",
        "cuda",
        *sets(replication__wire="topk:0.1"),
        "--out",
        "run",
        *TINY,
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    assert (
        done.stderr.count("ConfigError: Wire format topk:0.1 keeps its residuals in host memory")
        == 1
    )
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


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
    for kind in ("cpu", "cuda-sim"):
        done = launch(3, "train", "--device", kind, "--out", kind, *few, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    one, other = losses(tmp_path / "cpu"), losses(tmp_path / "cuda-sim")
    assert one.keys() == other.keys() == set(range(1, 6))
    assert all(abs(other[step][0] / one[step][0] - 1) <= 1e-4 for step in one)
    assert one[5][0] < one[1][0]
    assert (
        tomllib.loads((tmp_path / "cuda-sim/config.toml").read_text())["device"]["kind"]
        == "cuda-sim"
    )
    went_on = launch(
        2,
        "train",
        "--out",
        "cuda-sim",
        "--resume",
        "--device",
        "cpu",
        *sets(run__steps=7),
        cwd=tmp_path,
    )
    assert went_on.returncode == 0, went_on.stderr
    said = {
        kind: mpitrain("eval", "cpu", *kind, "--rows", "20", cwd=tmp_path).stdout
        for kind in ((), ("--device", "auto"))
    }
    assert len(set(said.values())) == 1 and "validation loss" in said[()]


@pytest.mark.parametrize("mpi_ranks", [3])
@pytest.mark.parametrize(
    "wire, adds, encodes", [("none", "add_into", set()), ("fp16", "decode_fp16", {"encode_fp16"})]
)
@pytest.mark.compile
def test_it_is_our_kernels_that_reduce_the_gradients(wire, adds, encodes, mpi_ranks, monkeypatch):
    settings = [word for word in TINY if word != "--set"]
    config = parse(
        with_settings(
            {},
            [
                *settings,
                "device.kind=cuda-sim",
                "replication.algorithm=ring",
                f"replication.wire={wire}",
            ],
        )
    )
    trainer = build(connect(), config).trainer
    kernels, launched = device_for("cuda-sim").kernels, []
    launch_one = kernels.launch
    monkeypatch.setattr(
        kernels,
        "launch",
        lambda name, *rest, **more: launched.append(name) or launch_one(name, *rest, **more),
    )
    trainer.gradients[:] = 1 + trainer.grid.dp.rank
    trainer.replication.reducer.run()
    assert np.all(trainer.gradients == 6)
    assert set(launched) == {adds, *encodes}
    assert launched.count(adds) >= 2, "what comes in each of two steps of a ring is added"


@pytest.mark.compile
def test_the_library_multiplies_where_train_is_told_so(tmp_path):
    done = mpitrain(
        "train",
        "--device",
        "cuda-sim",
        "--gemm",
        "library",
        "--out",
        "run",
        *TINY,
        *sets(run__steps=1, run__eval_every=-1),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["device"]["gemm"] == "library"
    done = mpitrain("train", "--gemm", "blas", cwd=tmp_path)
    assert done.returncode == 2 and "device.gemm must be 'tiled' or 'library'," in done.stderr


@pytest.mark.compile
def test_a_table_of_tiles_is_used_and_kept_with_the_run(tmp_path):
    words = [
        "train",
        "--device",
        "cuda-sim",
        *sets(device__tiles="mine.json"),
        "--out",
        "run",
        *TINY,
        *sets(run__steps=1, run__eval_every=-1),
    ]
    done = launch(2, *words, cwd=tmp_path)
    assert (
        done.returncode == 2
        and done.stderr.count("The table of tiles mine.json cannot be read") == 1
    ), done.stderr
    write_tiles(
        tmp_path / "mine.json",
        "simulator",
        [FastestTile("float32", "NT", 64, 64, 16, Tiling(TILES[1], 1))],
    )
    done = launch(2, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/tiles.json").read_text() == (tmp_path / "mine.json").read_text()
    (tmp_path / "mine.json").unlink()
    went_on = launch(2, "train", "--out", "run", "--resume", *sets(run__steps=2), cwd=tmp_path)
    assert went_on.returncode == 0, went_on.stderr


def test_auto_is_resolved_in_the_run_directory(tmp_path):
    (tmp_path / "cupy.py").write_text(NO_DRIVER)
    paths = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = launch(2, "train", "--out", "run", *TINY, *sets(run__steps=1), cwd=tmp_path, env=paths)
    assert done.returncode == 0, done.stderr
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["device"] == {
        "kind": "cpu",
        "cuda_aware": "auto",
        "gemm": "tiled",
        "tiles": "",
        "passes": "numpy",
    }


def test_doctor_says_whether_messages_may_lie_in_gpu_memory():
    done = mpitrain("doctor")
    assert "CUDA-aware   no, says MPIX_" in done.stdout, done.stdout + done.stderr
    assert sys.executable in done.stdout
