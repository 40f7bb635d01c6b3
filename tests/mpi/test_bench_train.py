"""`mpitrain bench train`: what it prints, and what it refuses. Never how fast."""

import json

import pytest

from mpitrain.cli.bench.train import TrainingJob, measure_sides
from mpitrain.config import parse, with_settings
from mpitrain.errors import ConfigError
from mpitrain.tools.bench.training import peers
from mpitrain.tools.bench.training import steps as training_steps
from mpitrain.transport.threads import run_ranks
from tests.processes import TINY_STEPS, calls_of_one_start, launch, sets

TINY = ["--blocks", "2", "--steps", "3", *TINY_STEPS]


def bench(ranks, *words):
    return launch(ranks, "bench", "train", *TINY, *words)


def test_alone_it_prints_one_side():
    done = bench(2)
    assert done.returncode == 0, done.stderr
    assert (
        "2 ranks, 6" in done.stdout
        and "\nmpitrain " in done.stdout
        and "times as fast" not in done.stdout
    )


def test_all_sides_do_the_same_work(tmp_path):
    """Ours, ours with other settings, and what PyTorch has like the first one's mode."""
    pytest.importorskip("torch")
    peers = [
        "torch DDP, gloo",
        "torch ZeroRedundancyOptimizer, gloo",
        "torch FSDP2 (reshard_after_forward=False), gloo",
        "torch FSDP2, gloo",
    ]  # by replication.zero
    command = ["bench", "train", *TINY, "--peer", "torch"]
    against = ["--against", "replication.algorithm=star", "--against", "replication.overlap=false"]
    calls = [
        [
            *command,
            *sets(model__tied="true", replication__zero=zero),
            *against,
            "--json",
            f"{zero}.json",
        ]
        for zero in range(len(peers))
    ]
    schedules = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
    for name in schedules:
        settings = sets(pipeline__schedule=name, batch__micro_batches=3)
        calls.append([*command, "--pp", "3", *settings, "--json", f"{name}.json"])
    settings = sets(model__width=24, model__heads=3, model__tied="true")
    calls.append([*command, "--alone", "--tp", "3", *settings, "--json", "tp.json"])
    _, printed = calls_of_one_start(3, calls, tmp_path, code=0)
    printed, of_stages, of_slices = printed[: len(peers)], printed[len(peers) : -1], printed[-1]
    ours, alone, theirs = json.loads((tmp_path / "tp.json").read_text())["sides"]
    assert theirs["name"] == "torch tensor parallel, gloo" and "3" in of_slices
    assert (
        alone["name"] == "one rank of mpitrain"
        and len(alone["comm_s"]) == len(alone["losses"])
        and not theirs["comm_s"]
    )
    for other in (alone, theirs):
        assert all(abs(a - b) <= 1e-4 for a, b in zip(ours["losses"], other["losses"], strict=True))
    for (name, peer), text in zip(schedules.items(), of_stages, strict=True):
        ours, theirs = json.loads((tmp_path / f"{name}.json").read_text())["sides"]
        assert (ours["name"], theirs["name"]) == (
            "mpitrain",
            f"torch {peer}, gloo",
        ) and f"3 stages by {name}, 3 micro" in text
        assert all(
            abs(a - b) <= 1e-4 for a, b in zip(ours["losses"], theirs["losses"], strict=True)
        )
    for zero, (peer, text) in enumerate(zip(peers, printed, strict=True)):
        names = [
            "mpitrain replication.algorithm=auto replication.overlap=true",
            "mpitrain replication.algorithm=star replication.overlap=false",
            peer,
        ]
        sides = json.loads((tmp_path / f"{zero}.json").read_text())["sides"]
        assert [side["name"] for side in sides] == names
        *_, second, third = text.strip().splitlines()
        for line, name in zip((second, third), names[1:], strict=True):
            assert line.startswith(names[0])
            assert f"fast as {name}" in line or f" and {name}:" in line
            apart = float(line.split("losses at most ")[1].split()[0])
            assert apart <= 1e-4, line


def test_shapes_are_measured_one_by_one_with_their_floor(tmp_path):
    pytest.importorskip("torch")
    tiny = sets(model__layers=2, model__width=12, model__heads=2, model__context=8, batch__size=8)
    command = ["bench", "train", "--blocks", "2", "--steps", "1", "--peer", "torch", *tiny]
    shapes = ["context-4096", "tp-2", "pp-2-gpipe-4"]
    calls = [
        [*command, "--shapes", ",".join(shapes), "--json", "shapes.json"],
        [*command, "--floor", "--json", "floor.json"],
    ]
    _, (table, floor) = calls_of_one_start(2, calls, tmp_path, code=0)
    rows = json.loads((tmp_path / "shapes.json").read_text())["rows"]
    assert [row["shape"] for row in rows] == shapes
    assert len({row["peer"] for row in rows}) == 3 and all(row["apart"] <= 1e-4 for row in rows)
    for row in rows:
        assert row["least"] <= row["ratio"] <= row["most"] and row["floor"] > 0
        assert f"\n{row['shape']} " in table and f"\n{row['shape']}, ms: " in table
    kinds = json.loads((tmp_path / "floor.json").read_text())["kinds"]
    assert {"attention", "mlp", "head"} <= {row["kind"] for row in kinds if row["products_s"]}
    assert "its bare products" in floor


def test_an_unknown_shape_is_one_error():
    done = launch(2, "bench", "train", "--shapes", "nonsense")
    assert done.returncode == 2 and done.stderr.count("ConfigError") == 1
    assert "'nonsense'" in done.stderr and "Traceback" not in done.stderr


def test_the_compiled_peer_is_ddp_and_needs_a_compiler(monkeypatch):
    torch_peer = pytest.importorskip("mpitrain.tools.bench.training.torch_peer")
    job = {"optimizer": {"clip": 0.0}, "device": {"kind": "cpu"}}
    assert peers.peer_class("torch-compiled", parse(job)) is torch_peer.CompiledPeer
    with pytest.raises(ConfigError, match="compiled peer"):
        peers.peer_class("torch-compiled", parse({**job, "replication": {"zero": 1}}))
    monkeypatch.setattr(torch_peer, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(ConfigError, match="no-such-compiler"):
        peers.peer_class("torch-compiled", parse(job))


@pytest.mark.compile
def test_kernels_take_turns_with_a_peer_and_a_file_has_the_times(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "train.json"
    words = "--device cuda-sim --gemm library --peer torch --steps 1 --json"
    done = bench(1, *words.split(), str(path))
    assert done.returncode == 0, done.stderr
    assert "cuda-sim, products by NumPy" in done.stdout
    ours, peer = json.loads(path.read_text())["sides"]
    assert (ours["name"], peer["name"]) == ("mpitrain", "torch") and len(ours["blocks"]) == len(
        peer["blocks"]
    ) == 2
    assert all(abs(a - b) <= 1e-4 for a, b in zip(ours["losses"], peer["losses"], strict=True))


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path):
    done = bench(2, "--json", str(tmp_path / "missing/train.json"))
    assert (
        done.returncode == 2
        and done.stderr.count("cannot be written: No such file or directory") == 1
    ), done.stderr
    assert "blocks of" not in done.stdout


def test_a_peer_that_cannot_use_the_gpu_is_one_message(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"The peer cannot use the GPU: PyTorch .* finds none"):
        peers.peer_class("torch", parse({"optimizer": {"clip": 0.0}, "device": {"kind": "cuda"}}))


def test_a_peer_that_is_not_installed_is_one_message(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "torch", ("nothing_of_this_name", "pip install torch", "Peer"))
    config = parse({"optimizer": {"clip": 0.0}})
    with pytest.raises(ConfigError, match="module nothing_of_this_name,"):
        peers.peer_class("torch", config)


@pytest.mark.parametrize(
    "setting",
    [
        "optimizer.name=sgd",
        "batch.micro_batches=2",
        "precision.compute=float64",
        "optimizer.clip=1.0",
        "layout.pp=2,pipeline.schedule=zb-v",
        "layout.pp=2,model.tied=true",
        "layout.pp=2,replication.zero=1",
        "layout.pp=2,batch.micro_batches=5",
        "layout.tp=2,layout.pp=2",
        "layout.tp=2,replication.zero=1",
        "layout.tp=2,layout.sequence_parallel=true",
        "layout.tp=2,model.dropout=0.1",
        "model.freeze=['blocks.*']",
        "optimizer.groups=[{match='*'}]",
    ],
)
def test_a_peer_that_would_do_other_work_is_refused(setting):
    with pytest.raises(ConfigError, match="The peer "):
        peers.peer_class(
            "torch", parse(with_settings({}, ["optimizer.clip=0.0", *setting.split(",")]))
        )


@pytest.mark.parametrize(
    "setting",
    [
        "model.width=8",
        "data.source=digits",
        "batch.size=3",
        "precision.compute=float64",
        "optimizer.name=sgd",
        "run.seed=1",
        "device.kind=cuda",
    ],
)
def test_another_side_that_would_do_other_work_is_refused(setting):
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=f"done, but {key}"):
        training_steps.check_same_work(["replication.algorithm=ring", setting])


def test_a_side_is_named_by_its_values_of_the_keys_that_differ():
    config = parse({"replication": {"overlap": False, "bucket_mb": 2.0}})
    keys = ["replication.overlap=true", "replication.algorithm=ring", "replication.bucket_mb=1.0"]
    assert training_steps.named(config, keys) == (
        "mpitrain replication.overlap=false replication.algorithm=auto replication.bucket_mb=2.0"
    )
    assert training_steps.named(config, []) == "mpitrain"


def test_the_ratio_is_taken_between_neighbouring_blocks():
    ours = training_steps.Result("mpitrain", [1.0, 4.0, 1.0], [0.5] * 3, [0.25] * 3)
    peer = training_steps.Result("peer", [2.0, 6.0, 1.5], [0.5, 0.75, 0.5], [])
    lines = training_steps.table([ours, peer], 100)
    assert (
        lines[1].split()[:4] == ["mpitrain", "1.0000", "0.2500", "100"]
        and lines[2].split()[2] == "-"
    )
    assert "mpitrain is 1.500" in lines[-1]
    assert lines[-1].endswith("losses at most 2.5e-01 apart")


def test_a_side_slowed_by_other_work_is_marked_without_a_ratio():
    ours = training_steps.Result("mpitrain", [1.0, 1.0, 1.0], [0.5] * 3, [])
    peer = training_steps.Result("peer", [131.0, 2.0, 150.0], [0.5] * 3, [])
    lines = training_steps.table([ours, peer], 0)
    assert lines[2].split()[1] == "131.0000~" and "~" not in lines[1]
    assert lines[-1].startswith(
        "mpitrain and peer: no ratio, as a median block took over 2 times the fastest (~)"
    )
    assert lines[-1].endswith("losses at most 0.0e+00 apart")


def test_a_rank_that_fails_alone_waits_for_nobody(monkeypatch):
    def alternate(transport, *_):
        if transport.rank == 1:
            raise RuntimeError("planted")
        transport.barrier()

    monkeypatch.setattr(training_steps, "alternate", alternate)
    with pytest.raises(RuntimeError, match="planted"):
        tiny = ["model.layers=1", "model.width=8", "model.context=8"]
        work = TrainingJob(tiny, 1, 1)
        run_ranks(2, measure_sides, work, [], False, (), False, (None, None))
