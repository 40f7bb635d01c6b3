"""`mpitrain bench train`: what it prints, and what it refuses. Never how fast."""

import json

import pytest

from mpitrain.bench import train
from mpitrain.config import parse, with_settings
from mpitrain.errors import ConfigError
from tests.processes import launch

TINY = ["--blocks", "2", "--steps", "3", "--set", "model.layers=1", "--set", "model.width=16", "--set", "model.context=16",
        "--set", "batch.size=6"]


def bench(ranks, *words):
    return launch(ranks, "bench", "train", *TINY, *words)


def test_alone_it_prints_one_side():
    done = bench(2)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, 6 rows per step" in done.stdout and "\nmpitrain " in done.stdout and "times as fast" not in done.stdout


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_both_sides_do_the_same_work(ranks):
    pytest.importorskip("torch")
    done = bench(ranks, "--peer", "torch", "--set", "model.tied=true")
    assert done.returncode == 0, done.stderr
    *_, verdict = done.stdout.strip().splitlines()
    assert verdict.startswith("mpitrain is ")
    apart = float(verdict.split("losses at most ")[1].split()[0])
    assert apart <= 1e-4, verdict


def test_kernels_take_turns_with_a_peer_and_a_file_has_the_times(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "train.json"
    done = bench(1, "--device", "cuda-sim", "--gemm", "library", "--peer", "torch", "--steps", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "cuda-sim, products by NumPy" in done.stdout
    ours, peer = json.loads(path.read_text())["sides"]
    assert (ours["name"], peer["name"]) == ("mpitrain", "torch") and len(ours["blocks"]) == len(peer["blocks"]) == 2
    assert all(abs(a - b) <= 1e-4 for a, b in zip(ours["losses"], peer["losses"], strict=True))


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path):
    done = bench(2, "--json", str(tmp_path / "missing/train.json"))
    assert done.returncode == 2 and done.stderr.count("cannot be written: No such file or directory") == 1, done.stderr
    assert "blocks of" not in done.stdout


def test_a_peer_that_cannot_use_the_gpu_is_one_message(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"The peer cannot use the GPU: PyTorch .* finds none"):
        train.peer_class("torch", parse({"optimizer": {"clip": 0.0}, "device": {"kind": "cuda"}}))


def test_a_peer_that_is_not_installed_is_one_message(monkeypatch):
    monkeypatch.setitem(train.PEERS, "torch", ("nothing_of_this_name", "pip install torch"))
    config = parse({"optimizer": {"clip": 0.0}})
    with pytest.raises(ConfigError, match="needs the module nothing_of_this_name, which is not installed"):
        train.peer_class("torch", config)


@pytest.mark.parametrize("setting", ["optimizer.name=sgd", "batch.micro_batches=2", "precision.compute=float64",
                                     "optimizer.clip=1.0"])
def test_a_peer_that_would_do_other_work_is_refused(setting):
    with pytest.raises(ConfigError, match="The peer "):
        train.peer_class("torch", parse(with_settings({}, ["optimizer.clip=0.0", setting])))


def test_the_ratio_is_taken_between_neighbouring_blocks():
    ours, peer = train.Result("mpitrain", [1.0, 4.0, 1.0], [0.5] * 3), train.Result("peer", [2.0, 6.0, 1.5], [0.5, 0.75, 0.5])
    lines = train.table([ours, peer], 100)
    assert lines[1].split()[:3] == ["mpitrain", "1.0000", "100"]
    assert "mpitrain is 1.500 times as fast as peer (neighbouring blocks 1.500 .. 2.000)" in lines[-1]
    assert lines[-1].endswith("losses at most 2.5e-01 apart")
