"""`mpitrain bench kernels` and `bench gemm`: every row is right, and what is missing is said in one message."""

import json
from functools import partial

import pytest
from click.testing import CliRunner

from mpitrain.cli.bench.collectives import command
from mpitrain.errors import MpitrainError
from mpitrain.ops.cuda.tiles import (
    DEFAULT,
    HOPPER_TILES,
    TENSOR_TILES,
    FastestTile,
    Tiling,
    read_tiles,
)
from mpitrain.tools.bench.kernels import gemm
from mpitrain.tools.bench.kernels import operations as kernel_operations
from tests.fakes import cupy, gpu

pytestmark = pytest.mark.compile


@pytest.fixture(autouse=True)
def once(monkeypatch):
    """Nothing is measured for longer than it needs to be right."""
    for name, value in (("FEWEST", 1), ("BUDGET", 0.0), ("MOMENT", 0.0)):
        monkeypatch.setattr(kernel_operations, name, value)


def bench(*arguments: str) -> tuple[int, list[list[str]], str]:
    """(exit code, rows as words, standard output, or everything printed if the command fails)"""
    done = CliRunner().invoke(command, arguments)
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    if isinstance(done.exception, MpitrainError):  # `main` prints it
        return done.exception.exit_code, rows, str(done.exception)
    return done.exit_code, rows, done.output if done.exit_code else done.stdout


@pytest.mark.parametrize("gemm", ["tiled", "library"])
def test_every_operation_is_right_in_the_simulator(gemm):
    code, rows, text = bench("kernels", "--device", "cuda-sim", "--gemm", gemm)
    assert code == 0, text
    measured = {"copy", "linear", "layer_norm", "attention", "cross_entropy_loss", "adamw"}
    assert measured | {"add_into"} <= {row[0] for row in rows}
    assert {row[-1] for row in rows} == {"0"}
    assert [line[:26].strip() for line in text.splitlines()[2:] if line.split()[-2] != "-"] == [
        "linear + residual",
        "linear input x gelu'",
        "bias + residual",
    ], "those in turns with the same in two passes"


def test_attention_takes_turns_with_a_peer_s(tmp_path):
    pytest.importorskip("torch")
    code, _, text = bench(
        "kernels", "--device", "cuda-sim", "--peer", "torch", "--json", str(tmp_path / "rows.json")
    )
    assert code == 0, text
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    for dtype in ("float32", "bfloat16"):
        for name in (f"attention {dtype}", f"attention back {dtype}"):
            assert rows[name]["peer_us"] > 0 and rows[name]["time_us"] > 0, name
    assert rows["adamw"]["peer_us"] is None


def test_products_are_right_on_the_cpu_and_in_the_simulator(tmp_path):
    shapes = ("--shapes", "1,33x20x41", "--json", str(tmp_path / "rows.json"))
    for kind, products in (
        ("cpu", ["NT", "NN", "TN"]),
        ("cuda-sim", ["NT", "NN", "TN", "NT+gelu", "TN+sums"]),
    ):
        code, rows, text = bench("gemm", "--device", kind, *shapes)
        assert code == 0 and {row[-1] for row in rows} == {"0"}, text
        found = json.loads((tmp_path / "rows.json").read_text())["rows"]
        assert [row["product"] for row in found] == [row[0] for row in rows] == products * 2
        assert [found[-1][dim] for dim in "mnk"] == [33, 20, 41]


@pytest.mark.parametrize(
    "words",
    [
        ("--dtype", "float16,bfloat16"),
        ("--gemm", "library"),
        ("--gemm", "3xtf32"),
        ("--checked", "--products", "NT+gelu,TN+sums"),
    ],
)
def test_products_are_right_in_every_way(words):
    code, rows, text = bench("gemm", "--device", "cuda-sim", "--shapes", "40x33x50", *words)
    assert code == 0 and {row[-1] for row in rows} == {"0"}, text
    assert ("-" in {row[7] for row in rows}) == ("library" in words), "which has no tiles"


def test_on_a_gpu_nothing_is_taken_for_numpy_s(monkeypatch, tmp_path):
    """The arrays of the fake GPU refuse to be NumPy's, and what is not waited for is garbage."""
    gpu.play(monkeypatch)
    monkeypatch.setitem(kernel_operations.SHAPES, "cuda", kernel_operations.SHAPES["cuda-sim"])
    monkeypatch.setitem(kernel_operations.MOVED, "cuda", kernel_operations.MOVED["cuda-sim"])
    for words in (
        ("kernels",),
        ("kernels", "--gemm", "library"),
        ("gemm", "--shapes", "33x20x41", "--dtype", "float32,bfloat16"),
        ("gemm", "--shapes", "9x8x4", "--tune", "--out", str(tmp_path / "tiles.json")),
    ):
        code, _, text = bench(*words, "--device", "cuda")
        assert code == 0 and "a fake GPU" in text, text
    assert cupy.faults == []


def test_a_wrong_product_is_counted_and_fails(monkeypatch):
    right = gemm.product.gemm
    wrong = partial(right, table=DEFAULT, alpha=1.01)
    monkeypatch.setattr(gemm.product, "library", lambda *operands, **words: None)
    monkeypatch.setattr(gemm.product, "chosen", lambda gemm, tiles: wrong)
    words = ("--shapes", "33", "--products", "NT,NT+gelu,TN+sums")
    code, rows, text = bench("gemm", "--device", "cuda-sim", *words)
    assert code == 1 and all(int(row[-1]) > 100 for row in rows), text


def test_tiles_of_warpgroups_stand_beside_those_of_other_kernels_in_the_file(tmp_path, monkeypatch):
    shape, out = ("bfloat16", "NT", 64, 72, 40), tmp_path / "tiles.json"
    tuned = [Tiling(tile, 1) for tile in (TENSOR_TILES[0], HOPPER_TILES[3], TENSOR_TILES[1])]
    for tiling in tuned:
        best = gemm.Tuned(FastestTile(*shape, tiling), 1, 1.0, 1.0, 0)
        monkeypatch.setattr(gemm, "tune", lambda *rest, best=best: iter([best]))
        words = "--device", "cuda-sim", "--tune", "--shapes", "64x72x40", "--out", str(out)
        assert bench("gemm", *words)[0] == 0
    assert [entry.tiling for entry in read_tiles(out).measured] == [tuned[2], tuned[1]]


def test_the_best_tiles_are_written_and_then_taken(tmp_path):
    table = str(tmp_path / "tiles.json")
    tune = ("gemm", "--device", "cuda-sim", "--tune", "--out", table, "--shapes")
    code, rows, text = bench(*tune, "9x17x256")
    assert code == 0 and [row[0] for row in rows] == ["NT", "NN", "TN", "written"], text
    assert {row[-2] for row in rows[:3]} == {"10"}, "five tiles, sums whole and in two parts"
    found = json.loads((tmp_path / "tiles.json").read_text())
    assert found["device"] == "simulator" and len(found["measured"]) == 3
    odd = {**found["measured"][0], "kernel": "gemm", "plan": [[64, 128, 16, 4, 8], 2]}
    found["measured"][0] = odd
    (tmp_path / "tiles.json").write_text(json.dumps(found))
    words = ("--tiles", table, "--shapes", "10x17x300", "--products", "NT")
    code, rows, text = bench("gemm", "--device", "cuda-sim", *words)
    assert code == 0 and rows[0][7] == "64x128x16/2", text
    assert bench(*tune, "4", "--gemm", "auto")[0] == 0
    written = json.loads((tmp_path / "tiles.json").read_text())
    assert [(line["head"], line["tokens"]) for line in written["attention"]] == [(16, 24)]
    both = written["measured"]
    assert len(both) == 6
    assert all((line["gain"] >= 1.3) >= (line["kernel"] == "gemm_tensor") for line in both[3:])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("gemm", "--shapes", "4x5"), "A shape is MxNxK or N"),
        (("gemm", "--dtype", "float8"), "'float8' is none of float32"),
        (("gemm", "--products", "NT,TT"), "'TT' is none of NT"),
        (("gemm", "--tune"), "Tiles belong to kernels"),
        (("gemm", "--dtype", "bfloat16"), "On the CPU float32 is multiplied"),
        (("gemm", "--device", "cuda-sim", "--tiles", "none.json"), "cannot be read"),
        (("kernels", "--gemm", "library"), "--gemm, --tensor-cores and --tiles are about products"),
        (("gemm", "--tiles", "none.json"), "--gemm, --tensor-cores and --tiles are about products"),
        (("gemm", "--out", "tiles.json"), "--out is where --tune writes its table"),
        (("gemm", "--shapes", "4", "--json", "missing/rows.json"), "rows.json"),
        (("kernels", "--checked"), "Use --device cuda-sim --checked."),
    ],
)
def test_what_cannot_be_measured_is_one_message_and_exit_2(words, complaint):
    code, _, text = bench(*words)
    assert code == 2 and complaint in text and "Traceback" not in text
