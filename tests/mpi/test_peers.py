"""`mpitrain compare` with peers and sides in memory: what it prints, and what it refuses. Never how fast."""

import json
from importlib.util import find_spec

import pytest

from mpitrain.cli.compare import TrainingJob, measure_sides
from mpitrain.config import parse, with_settings
from mpitrain.errors import ConfigError
from mpitrain.tools.bench.training import peers
from mpitrain.tools.bench.training import steps as training_steps
from mpitrain.transport.threads import run_ranks
from tests.processes import TINY_STEPS, calls_of_one_start, sets

TINY = ["--blocks", "2", "--steps", "2", *TINY_STEPS]
SMALL = sets(model__layers=2, model__width=12, model__heads=2, model__context=8, batch__size=8)


def test_alone_it_prints_one_side_and_what_is_wrong_is_said_before_it_measures(tmp_path):
    command = ["compare", "--kept", *TINY]
    calls = [
        command,
        ["compare", *TINY, "--shapes", "nonsense"],
        [*command, "--json", "gone/train.json"],
    ]
    said, printed = calls_of_one_start(2, calls, tmp_path, [0, 2, 2])
    assert (
        "2 ranks, 6" in printed[0]
        and "\nmpitrain " in printed[0]
        and "blocks in turns" not in printed[0]
    )
    for text, complaint in zip(said[1:], ("'nonsense'", "cannot be written: No such"), strict=True):
        assert text.count("ConfigError") == text.count(complaint) == 1, text
        assert "Traceback" not in text
    assert "blocks of" not in printed[2]


PEERS = {0: "torch DDP, gloo", 3: "torch FSDP2, gloo"}
"""By replication.zero."""
BOTH = ["gloo", "mpitrain"]
OUR_BACKEND = ["--peer", "torch:mpitrain"]
AGAINST = ("replication.algorithm=star", "replication.overlap=false")
SHAPES = {
    "context-4096": PEERS[0],
    "tp-2": "torch tensor parallel, gloo",
    "pp-2-gpipe-4": "torch ScheduleGPipe, gloo",
}
"""Names of shapes, and their peers."""


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """What each call of one start of two ranks printed and wrote: {name: (text, JSON)}."""
    pytest.importorskip("torch")
    tied = sets(model__tied="true")
    bare = ["--peer", "bare-products", "--peer", "one-rank"]
    calls = {
        "against": ["job", "+".join(AGAINST), *TINY, *tied, *bare],
        PEERS[3]: [*TINY, *tied, *sets(replication__zero=3)],
        "1f1b": [
            *TINY,
            *OUR_BACKEND,
            *sets(layout__pp=2, pipeline__schedule="1f1b", batch__micro_batches=2),
        ],
        "shapes": ["--blocks", "2", "--steps", "1", "--shapes", ",".join(SHAPES), *SMALL],
    }
    if find_spec("transformers"):
        llama = sets(model__kind="llama", model__kv_heads=1, model__qkv_bias="true")
        calls["llama"] = [*TINY, *llama, *sets(replication__zero=3)]
    folder = tmp_path_factory.mktemp("sides")
    words = [
        ["compare", "--peer", "torch", *more, "--json", f"{number}.json"]
        for number, more in enumerate(calls.values())
    ]
    # The old word, with options of its own.
    own = [
        "--alone",
        "--floor",
        "--tp",
        "2",
        "--peer-backend",
        "gloo",
        "--peer-backend",
        "mpitrain",
    ]
    calls["tp"] = ["bench", "train", "--peer", "torch", *own, *TINY, *tied]
    words.append([*calls["tp"], "--json", f"{len(words)}.json"])
    _, printed = calls_of_one_start(2, words, folder, code=0)
    written = [json.loads((folder / f"{number}.json").read_text()) for number in range(len(calls))]
    return dict(zip(calls, zip(printed, written, strict=True), strict=True))


def measured(sides, name):
    """The names of the sides of a call, whose losses are equal to rounding."""
    found = sides[name][1]["rows"]
    for other in found[1:]:
        if other["side"] != "bare products":
            pairs = zip(found[0]["losses"], other["losses"], strict=True)
            assert all(abs(one - theirs) <= 1e-4 for one, theirs in pairs), (name, other["side"])
    return [side["side"] for side in found]


def test_sides_of_other_settings_and_pytorch_do_the_same_work(sides):
    ours = ["mpitrain", "mpitrain replication.algorithm=star+replication.overlap=false"]
    names = [*ours, "one rank of mpitrain", PEERS[0], "bare products"]
    assert measured(sides, "against") == names
    text, written = sides["against"]
    for row in written["rows"]:
        assert f"\n{row['side']} " in text and row["tokens"]
        assert row["side"] in ("mpitrain", "bare products") or row["apart"] <= 1e-4


def test_the_third_stage_of_zero_has_its_peer(sides):
    assert measured(sides, PEERS[3]) == ["mpitrain", PEERS[3]]


def test_the_peer_of_a_llama_is_that_of_transformers(sides):
    pytest.importorskip("transformers")
    assert measured(sides, "llama") == ["mpitrain", PEERS[3]]


def test_stages_have_the_schedule_of_pytorch(sides):
    theirs = [f"torch Schedule1F1B, {backend}" for backend in BOTH]
    assert measured(sides, "1f1b") == ["mpitrain", *theirs]
    assert "2 stages by 1f1b, 2 micro" in sides["1f1b"][0]


def test_slices_have_a_peer_and_one_rank_alone_by_the_old_word(sides):
    theirs = [f"torch tensor parallel, {backend}" for backend in BOTH]
    names = ["mpitrain", "one rank of mpitrain", *theirs, "bare products"]
    assert measured(sides, "tp") == names
    _, alone, torch, _, bare = sides["tp"][1]["rows"]
    assert alone["comm_s"] >= 0 and torch["comm_s"] is None and bare["apart"] is None


def test_shapes_are_measured_one_by_one_with_their_floor(sides):
    table, rows = sides["shapes"][0], sides["shapes"][1]["rows"]
    sides_of = {name: [row["side"] for row in rows if row["of"] == name] for name in SHAPES}
    assert sides_of == {name: ["mpitrain", peer, "bare products"] for name, peer in SHAPES.items()}
    for row in rows:
        assert f"\n{row['of']} " in table and row["blocks"]
        assert row["side"] in ("mpitrain", "bare products") or row["apart"] <= 1e-4


def test_the_compiled_peer_is_ddp_and_needs_a_compiler(monkeypatch):
    torch_peer = pytest.importorskip("mpitrain.tools.bench.training.torch_peer")
    job = {"optimizer": {"clip": 0.0}, "device": {"kind": "cpu"}}
    assert peers.peer_class("torch-compiled", parse(job)) is torch_peer.CompiledPeer
    with pytest.raises(ConfigError, match="compiled peer"):
        peers.peer_class("torch-compiled", parse({**job, "replication": {"zero": 3}}))
    monkeypatch.setattr(torch_peer, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(ConfigError, match="no-such-compiler"):
        peers.peer_class("torch-compiled", parse(job))


@pytest.mark.compile
def test_kernels_take_turns_with_a_peer_and_a_file_has_the_times(tmp_path, capsys):
    pytest.importorskip("torch")
    path = tmp_path / "train.json"
    job = [word for word in TINY_STEPS if word != "--set"]
    settings = [*job, "device.kind=cuda-sim", "device.gemm=library"]
    work = TrainingJob(settings, 2, 1, outputs={"json_file": path})
    run_ranks(1, measure_sides, work, ["job"], ["torch"])
    assert "cuda-sim, products by NumPy" in capsys.readouterr().out
    ours, peer = json.loads(path.read_text())["rows"]
    assert (ours["side"], peer["side"]) == ("mpitrain", "torch") and len(ours["blocks"]) == len(
        peer["blocks"]
    ) == 2
    assert all(abs(a - b) <= 1e-4 for a, b in zip(ours["losses"], peer["losses"], strict=True))


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
        "model.dropout=0.1",
        "replication.zero=2",
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
        "optimizer.clip=1.0",
        "lora.rank=8",
        "run.seed=1",
        "device.kind=cuda",
    ],
)
def test_another_side_that_would_do_other_work_is_refused(setting):
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=f"done, but {key} changes"):
        training_steps.check_same_work(["replication.algorithm=ring", setting])


def test_a_rank_that_fails_alone_waits_for_nobody(monkeypatch):
    def alternate(transport, *_):
        if transport.rank == 1:
            raise RuntimeError("planted")
        transport.barrier()

    monkeypatch.setattr(training_steps, "alternate", alternate)
    with pytest.raises(RuntimeError, match="planted"):
        tiny = ["model.layers=1", "model.width=8", "model.context=8"]
        work = TrainingJob(tiny, 1, 1)
        run_ranks(2, measure_sides, work, ["job"], [])
