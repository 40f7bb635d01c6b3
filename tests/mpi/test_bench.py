"""`mpitrain bench` as a user runs it: what it prints and writes, and that it tells right from wrong."""

import json
import signal
import subprocess
import time
from importlib.util import find_spec

import pytest

from tests.processes import (
    PROGRAM,
    SECONDS,
    TINY_STEPS,
    calls_of_one_start,
    launch,
    python_ranks,
    sets,
)

KEYS = {
    "op",
    "algorithm",
    "bytes",
    "dtype",
    "ranks",
    "time_us",
    "min_us",
    "p99_us",
    "algbw_GBs",
    "busbw_GBs",
    "predicted_us",
    "wrong",
    "error",
    "sweep",
}
NO_TORCH = "" if find_spec("torch") else "is a backend of PyTorch, which is not installed"
NO_PLOT = "--plot needs matplotlib" if find_spec("matplotlib") is None else ""


FACTORS = {
    "all-reduce": 4 / 3,
    "reduce-scatter": 2 / 3,
    "all-gather": 2 / 3,
    "broadcast": 1,
    "reduce": 1,
    "all-to-all": 2 / 3,
    "send-receive": 1,
}
"""Bus bandwidth over the algorithm's, on three ranks."""
OPS = {"all-reduce": "allreduce", "send-receive": "sendrecv"}
"""Names of operations in files, where they are others."""
DTYPES = ("float64", "float16", "bfloat16", "int32")
SIZES = ["--min-bytes", "12", "--max-bytes", "48K", "--factor", "64", "--iterations", "3"]
LINKS = ["--iterations", "3", "--json", "links.json", "--csv", "links.csv"]
OF_PYTORCH = [operation for operation in FACTORS if find_spec("torch")]
THREE = {
    **{operation: [operation, *SIZES, "--json", f"{operation}.json"] for operation in FACTORS},
    **{f"torch {name}": [name, "--algorithm", "gloo,mpitrain", *SIZES] for name in OF_PYTORCH},
    **{
        dtype: ["allreduce", "--algorithm", "ring,shared,auto", "--dtype", dtype, *SIZES]
        for dtype in DTYPES
    },
    "pairs": ["pairs", "--long", "64K", *LINKS],
    "bandwidth": [
        *(
            [
                "bandwidth",
                "--pairs",
                "all",
                "--max-bytes",
                "64K",
                "--factor",
                "256",
                "--window",
                "8",
            ]
        ),
        *LINKS,
    ],
    "no least": [
        *(["broadcast", "--algorithm", "native", "--fail-below", "0", "--csv", "rows.csv"]),
        *SIZES,
    ],
    "least": [*(["broadcast", "--algorithm", "native,binomial", "--fail-below", "1e6"]), *SIZES],
}
"""Calls of one start of three ranks. The last one fails."""


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """The folder of these calls, and what each printed."""
    folder = tmp_path_factory.mktemp("three")
    codes = [int(name == "least") for name in THREE]
    calls = [["bench", *words] for words in THREE.values()]
    short = "from mpitrain.tools.bench.collectives import sweep\nsweep.SECONDS = 0.01"
    printed = calls_of_one_start(3, calls, folder, codes, short)[1]
    return folder, dict(zip(THREE, printed, strict=True))


@pytest.mark.parametrize("operation", FACTORS)
def test_a_collective_is_measured_checked_and_written(operation, three):
    folder, printed = three
    assert "wrong elements 0" in printed[operation]
    written = json.loads((folder / f"{operation}.json").read_text())
    assert written["header"]["ranks"] == 3
    assert {row["bytes"] for row in written["rows"]} == {12, 768, 49152}
    for row in written["rows"]:
        assert row.keys() >= KEYS
        assert (
            row["op"] == OPS.get(operation, operation)
            and row["wrong"] == 0
            and row["min_us"] <= row["time_us"] <= row["p99_us"]
        )
        assert row["busbw_GBs"] == pytest.approx(row["algbw_GBs"] * FACTORS[operation])
        assert row["algbw_GBs"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3)


@pytest.mark.skipif(not OF_PYTORCH, reason="PyTorch is not installed")
def test_collectives_of_pytorch_are_measured_and_checked(three):
    for name in OF_PYTORCH:
        printed = three[1][f"torch {name}"]
        assert "wrong elements 0" in printed
        assert printed.count("  gloo  ") == printed.count("  mpitrain  ") == 3, name


def test_every_dtype_is_measured(three):
    for dtype in DTYPES:
        assert three[1][dtype].count(f" {dtype}  ") == 3 * 3, "three algorithms, three sizes"


def test_pairs_bandwidth_tables_for_spreadsheets_and_a_least_bandwidth(three):
    folder, printed = three
    assert (
        "within a host        3 " in printed["pairs"]
        and "bandwidth, GB/s, one way" in printed["pairs"]
        and "wrong elements 0" in printed["pairs"]
    )
    bandwidth = printed["bandwidth"]
    assert "wrong elements 0" in bandwidth and " both " in bandwidth and " one " in bandwidth
    written = json.loads((folder / "links.json").read_text())
    assert [(row["bytes"], row["ways"], row["pairs"]) for row in written["rows"]] == [
        (nbytes, ways, 1) for nbytes in (1, 256, 65536) for ways in ("one", "both")
    ]
    assert len((folder / "links.csv").read_text().splitlines()) == 1 + 6
    assert len((folder / "rows.csv").read_text().splitlines()) == 1 + 3
    assert "too slow" not in printed["no least"]
    failed = printed["least"]
    assert failed.count("too slow: ") == 2 and failed.count("  native  ") >= 3, (
        "the table is printed all the same"
    )


def test_a_wrong_element_is_counted_and_is_a_failure(tmp_path):
    code = (
        "from mpitrain.collectives.plans import ring\n"
        "from mpitrain.collectives.selection import table\n"
        "dict.__setitem__(table.ALL_REDUCE, 'ring', table.of_plan(ring.all_gather))\n"
        "from mpitrain.cli import main; main(['bench', 'allreduce', '--algorithm', 'ring', '--max-bytes', '4K'])"
    )
    done = python_ranks(2, code, None)
    assert done.returncode != 0
    assert "wrong elements 2048" in done.stdout


LAUNCHERS = {
    "launch": [*PROGRAM, "launch", "-n", "2", "--"],
    "mpirun": ["mpirun", "-n", "2", *PROGRAM],
}


@pytest.mark.parametrize(
    "launcher, asked_by", [("launch", signal.SIGINT), ("mpirun", signal.SIGTERM)]
)
def test_what_was_measured_survives_an_interruption(launcher, asked_by, tmp_path):
    process = subprocess.Popen(
        [
            *LAUNCHERS[launcher],
            "bench",
            "allreduce",
            "--iterations",
            "20",
            "--sweeps",
            "99",
            "--json",
            "rows.json",
        ],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    rows, deadline = tmp_path / "rows.json", time.monotonic() + SECONDS
    while not rows.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(asked_by)
    assert process.wait(timeout=SECONDS) != 0
    written = json.loads(rows.read_text())
    assert written["header"]["op"] == "allreduce" and written["rows"]
    assert all(row.keys() >= KEYS for row in written["rows"])


@pytest.mark.compile
def test_the_simulator_s_kernels_reduce_what_is_measured_on_it(tmp_path):
    words = "allreduce --device cuda-sim --algorithm ring,native,auto --wire fp16,int8,topk:0.1"
    sizes = "--max-bytes 12K --iterations 1 --warmup 1 --json rows.json"
    done = launch(2, "bench", *words.split(), *sizes.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "device cuda-sim" in done.stdout and "wrong elements 0" in done.stdout
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["header"]["device"] == "cuda-sim"
    wires = {f"wire {wire}" for wire in ("fp16", "int8", "topk:0.1")}
    assert {row["algorithm"] for row in written["rows"]} == {"ring", "native", "auto", *wires}
    assert all(row["predicted_us"] is None for row in written["rows"]), (
        "the model is one of the host's memory"
    )


def test_one_rank_is_measured_and_sizes_that_come_to_the_same_once_and_has_nothing_to_fit(tmp_path):
    sizes = "--min-bytes 1 --max-bytes 8 --factor 2 --iterations 1 --json rows.json"
    calls = [["bench", "allreduce", *sizes.split()], ["bench", "fit"]]
    said, _ = calls_of_one_start(1, calls, tmp_path, [0, 2])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["bytes"] for row in rows if row["algorithm"] == "ring"] == [4, 8]
    assert "one rank sends none" in said[1]


MISTAKES = [
    (["--algorithm", "rign"], "allreduce algorithm must be one of ring, halving-doubling"),
    (["--dtype", "float8"], "dtype must be one of float32"),
    (["--buffers", "gpu"], "buffers of allreduce must be one of window, plain"),
    (["--wire", "fp8"], "wire is one of none, fp16, bf16, int8"),
    (["--wire", "powersgd:inf"], "but it is 'powersgd:inf'"),
    (
        ["--wire", "fp16", "--dtype", "int32"],
        "--wire is for arrays of float32, but these are of int32",
    ),
    (["--min-bytes", "many"], "is no number of bytes"),
    (["--tuning", "nothing.json"], "nothing.json cannot be read"),
    (
        ["--min-bytes", "0"],
        "Sizes go from the smallest array (at least 1 byte) to the largest, but these are 0 and",
    ),
    (["--min-bytes", "8K", "--max-bytes", "4K"], "but these are 8192 and 4096"),
    (["--min-bytes", "-4"], "is no number of bytes"),
    (["--fail-below", "nan"], "'--fail-below': nan is not a finite number."),
    (["--factor", "nan"], "Sizes grow by a factor of 1.01 or more, but this is nan"),
    (
        ["--dtype", "bfloat16", "--algorithm", "ring,native"],
        "native needs a dtype that MPI reduces, which bfloat16 is not",
    ),
    (["--algorithm", "nccl"], NO_TORCH or "nccl needs arrays on GPUs, but --device is cpu"),
    (
        ["--json", "nowhere/rows.json"],
        "nowhere/rows.json cannot be written: No such file or directory",
    ),
    (["--json", "."], "cannot be written: it is a folder"),
    (["--plot", "rows.xyz"], NO_PLOT or "--plot draws files that end in"),
    (["--plot", "nowhere/rows.png"], NO_PLOT or "nowhere/rows.png cannot be written"),
]


TWO = {
    "wire": "allreduce --algorithm ring --wire fp16,bf16,int8,topk,topk:0.1,powersgd:2 --max-bytes 16K --iterations 2",
    "all": "allreduce --dtype bfloat16 --max-bytes 4K --iterations 1",
    "fit": "fit --min-bytes 512 --max-bytes 4K --sweeps 1",
    "auto": "allreduce --algorithm auto --tuning tuning.json --max-bytes 16K",
}
"""Calls of one start of two ranks, after the mistakes; then one trains with tuning.json."""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What was said of each mistake and printed, and what each call printed."""
    calls = [["allreduce", *words] for words, _ in MISTAKES] + [
        line.split() for line in TWO.values()
    ]
    said, printed = calls_of_one_start(
        2,
        [
            *(["bench", *words] for words in calls),
            ["train", *TINY_STEPS, *sets(run__steps=1, replication__tuning="tuning.json")],
        ],
        tmp_path_factory.mktemp("two"),
        [2] * len(MISTAKES) + [0] * len(TWO) + [0],
        # Rows are short, and other work spoils none: else the fit would depend on the load.
        "from mpitrain.tools.bench.collectives import fit, sweep\n"
        "fit.is_spoilt, sweep.SECONDS = lambda row: False, 0.01",
    )
    many = len(MISTAKES)
    return said[:many], printed[:many], dict(zip(TWO, printed[many:], strict=False))


def test_a_wrong_option_is_one_message_and_exit_code_2(two):
    said, printed, _ = two
    assert "#wrong" not in "".join(printed), "it is said before anything is measured"
    missed = [
        (words, text)
        for (words, message), text in zip(MISTAKES, said, strict=True)
        if text.count(message) != 1 or "Traceback" in text
    ]
    assert missed == []


def test_wire_formats_are_measured_beside_the_algorithms(two):
    for name in ("fp16", "bf16", "int8", "topk:0.01", "topk:0.1", "powersgd:2"):
        assert two[2]["wire"].count(f"wire {name} ") == 3, "two rows and an average"
    assert "wrong elements 0\nreplicas that differ 0" in two[2]["wire"]


def test_all_are_the_algorithms_that_can_run_with_the_dtype(two):
    assert "  native  " not in two[2]["all"] and "  shared  " in two[2]["all"]


def test_fit_writes_what_auto_then_reads(two):
    fit = two[2]["fit"]
    assert "bytes decide: auto takes" in fit and "  auto: " in two[2]["auto"]
    assert fit.count(" arrays of sizes left out: predicted within ") == 2
