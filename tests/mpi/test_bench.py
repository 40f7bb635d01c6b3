"""`mpitrain bench` as a user runs it: what it prints and writes, and that it tells right from wrong."""

import json
import signal
import subprocess
import time
from importlib.util import find_spec

import pytest

from mpitrain.collectives.selection.tuning import read_tuning
from tests.processes import PROGRAM, SECONDS, calls_of_one_start, launch, python_ranks

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
NO_PLOT = "--plot needs matplotlib" if find_spec("matplotlib") is None else ""


def words(line):
    return line.split()


def bench(ranks, line, *more, **options):
    return launch(ranks, "bench", *words(line), *more, **options)


def is_measured_checked_and_written(operation, factor, printed, path):
    """What three ranks say and write of a collective; bus bandwidth is `factor` times the algorithm's."""
    assert "wrong elements 0" in printed
    written = json.loads(path.read_text())
    assert written["header"]["ranks"] == 3
    assert {row["bytes"] for row in written["rows"]} == {12, 768, 49152}
    for row in written["rows"]:
        assert row.keys() >= KEYS
        assert (
            row["op"] == {"send-receive": "sendrecv"}.get(operation, operation)
            and row["wrong"] == 0
            and row["min_us"] <= row["time_us"] <= row["p99_us"]
        )
        assert row["busbw_GBs"] == pytest.approx(row["algbw_GBs"] * factor)
        assert row["algbw_GBs"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3)


SIZES = ["--min-bytes", "12", "--max-bytes", "48K", "--factor", "64", "--iterations", "3"]


def test_a_collective_is_measured_checked_and_written(tmp_path):
    done = bench(3, "all-reduce", *SIZES, "--json", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    is_measured_checked_and_written("allreduce", 4 / 3, done.stdout, tmp_path / "rows.json")


def test_so_is_every_other_one_and_every_dtype(tmp_path):
    factors = {
        "reduce-scatter": 2 / 3,
        "all-gather": 2 / 3,
        "broadcast": 1,
        "reduce": 1,
        "all-to-all": 2 / 3,
        "send-receive": 1,
    }
    dtypes = ["float64", "float16", "bfloat16", "int32"]
    calls = [["bench", operation, *SIZES, "--json", f"{operation}.json"] for operation in factors]
    calls += [
        ["bench", "allreduce", "--algorithm", "ring,shared,auto", "--dtype", dtype, *SIZES]
        for dtype in dtypes
    ]
    _, printed = calls_of_one_start(3, calls, tmp_path, code=0)
    for (operation, factor), text in zip(factors.items(), printed, strict=False):
        is_measured_checked_and_written(operation, factor, text, tmp_path / f"{operation}.json")
    for dtype, text in zip(dtypes, printed[len(factors) :], strict=True):
        assert text.count(f" {dtype}  ") == 3 * 3, "three algorithms, three sizes"


def test_pairs_bandwidth_tables_for_spreadsheets_and_a_least_bandwidth(tmp_path):
    """Of calls of one start: what they print and write, and their exit codes."""
    short = ["--iterations", "3", "--json", "found.json", "--csv", "found.csv"]
    calls = [
        ["bench", "pairs", "--long", "64K", *short],
        [
            "bench",
            "bandwidth",
            "--pairs",
            "all",
            "--max-bytes",
            "64K",
            "--factor",
            "256",
            "--window",
            "8",
            *short,
        ],
        [
            "bench",
            "broadcast",
            *SIZES,
            "--algorithm",
            "native",
            "--fail-below",
            "0",
            "--csv",
            "rows.csv",
        ],
    ]
    _, (pairs, bandwidth, broadcast) = calls_of_one_start(3, calls, tmp_path, code=0)
    assert (
        "within a host        3 " in pairs
        and "bandwidth, GB/s, one way" in pairs
        and "wrong elements 0" in pairs
    )
    assert "wrong elements 0" in bandwidth and " both " in bandwidth and " one " in bandwidth
    written = json.loads((tmp_path / "found.json").read_text())
    assert [(row["bytes"], row["ways"], row["pairs"]) for row in written["rows"]] == [
        (nbytes, ways, 1) for nbytes in (1, 256, 65536) for ways in ("one", "both")
    ]
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 1 + 6
    assert (
        len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + 3
        and "too slow" not in broadcast
    )
    least = ["bench", "broadcast", *SIZES, "--algorithm", "native,binomial", "--fail-below", "1e6"]
    _, (failed,) = calls_of_one_start(3, [least], tmp_path, code=1)
    assert failed.count("too slow: ") == 2 and failed.count("  native  ") >= 3, (
        "the table is printed all the same"
    )


def test_wire_formats_are_measured_beside_the_algorithms(tmp_path):
    done = bench(
        2,
        "allreduce --algorithm ring --wire fp16,bf16,int8,topk,topk:0.1,powersgd:2 --max-bytes 16K --iterations 2",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for name in ("fp16", "bf16", "int8", "topk:0.01", "topk:0.1", "powersgd:2"):
        assert done.stdout.count(f"wire {name} ") == 3, "two rows and an average"
    assert "wrong elements 0\nreplicas that differ 0" in done.stdout


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


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("asked_by", [signal.SIGINT, signal.SIGTERM])
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
    done = bench(
        3,
        "allreduce --device cuda-sim --wire fp16,bf16,int8,topk:0.1 --max-bytes 12K --iterations 1 --warmup 1 --json rows.json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "device cuda-sim" in done.stdout and "wrong elements 0" in done.stdout
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["header"]["device"] == "cuda-sim"
    assert {row["algorithm"] for row in written["rows"]} >= {
        "ring",
        "native",
        "auto",
        "wire int8",
        "wire topk:0.1",
    }
    assert all(row["predicted_us"] is None for row in written["rows"]), (
        "the model is one of the host's memory"
    )


def test_all_are_the_algorithms_that_can_run_with_the_dtype(tmp_path):
    done = bench(2, "allreduce --dtype bfloat16 --max-bytes 4K --iterations 1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "  native  " not in done.stdout and "  shared  " in done.stdout


def test_one_rank_is_measured_and_sizes_that_come_to_the_same_once(tmp_path):
    done = bench(
        1,
        "allreduce --min-bytes 1 --max-bytes 8 --factor 2 --iterations 1 --json rows.json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["bytes"] for row in rows if row["algorithm"] == "ring"] == [4, 8]


MISTAKES = [
    (["--algorithm", "rign"], "allreduce algorithm must be one of ring, halving-doubling"),
    (["--dtype", "float8"], "dtype must be one of float32"),
    (["--buffers", "gpu"], "buffers of allreduce must be one of window, plain, leased"),
    (["--wire", "fp8"], "wire is one of none, fp16, bf16, int8"),
    (["--wire", "powersgd:inf"], "but it is 'powersgd:inf'"),
    (
        ["--wire", "fp16", "--buffers", "window,leased"],
        "--wire is for gradients, but --buffers has activations",
    ),
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
    (
        ["--json", "nowhere/rows.json"],
        "nowhere/rows.json cannot be written: No such file or directory",
    ),
    (["--json", "."], "cannot be written: it is a folder"),
    (["--plot", "rows.xyz"], NO_PLOT or "--plot draws files that end in"),
    (["--plot", "nowhere/rows.png"], NO_PLOT or "nowhere/rows.png cannot be written"),
]


def test_a_wrong_option_is_one_message_and_exit_code_2(tmp_path):
    said, printed = calls_of_one_start(
        2, [["bench", "allreduce", *words] for words, _ in MISTAKES], tmp_path, code=2
    )
    assert "#wrong" not in "".join(printed), "it is said before anything is measured"
    missed = [
        (words, text)
        for (words, message), text in zip(MISTAKES, said, strict=True)
        if text.count(message) != 1 or "Traceback" in text
    ]
    assert missed == []
    done = bench(2, "allreduce", *MISTAKES[0][0], cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count(MISTAKES[0][1]) == 1, done.stderr


def test_fit_writes_what_auto_then_reads(tmp_path):
    done = bench(2, "fit --min-bytes 512 --max-bytes 4K --sweeps 1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sizes left out: predicted" in done.stdout
    done = bench(2, "allreduce --algorithm auto --tuning tuning.json --max-bytes 16K", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "  auto: " in done.stdout
    done = bench(1, "fit", cwd=tmp_path)
    assert done.returncode == 2 and "one rank sends none" in done.stderr


def test_a_fit_that_is_interrupted_keeps_the_sweeps_before(tmp_path):
    words = ["bench", "fit", "--min-bytes", "512", "--max-bytes", "1K", "--sweeps", "999"]
    process = subprocess.Popen(
        [*LAUNCHERS["launch"], *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    line = next(line for line in process.stdout if line.startswith("sweep"))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SECONDS)
    assert process.returncode != 0 and line == "sweep 1 of 999: written to tuning.json\n"
    assert set(read_tuning(tmp_path / "tuning.json").plans) == {2}
