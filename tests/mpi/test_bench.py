"""`mpitrain bench` as a user runs it: what it prints and writes, and that it tells right from wrong."""

import json
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = [sys.executable, "-m", "mpitrain"]
KEYS = {"op", "algorithm", "bytes", "dtype", "ranks", "time_us", "min_us", "p99_us", "algbw_GBs", "busbw_GBs", "predicted_us",
        "wrong"}


def bench(ranks, *words, **more):
    return subprocess.run([*PROGRAM, "launch", "-n", str(ranks), "--", "bench", *words], capture_output=True, text=True,
                          timeout=100, **more)


@pytest.mark.parametrize(("operation", "factor"), [("allreduce", 4 / 3), ("reduce-scatter", 2 / 3), ("all-gather", 2 / 3),
                                                   ("broadcast", 1), ("reduce", 1), ("all-to-all", 2 / 3), ("sendrecv", 1)])
def test_every_collective_is_measured_checked_and_written(operation, factor, tmp_path):
    done = bench(3, operation, "--min-bytes", "12", "--max-bytes", "48K", "--factor", "64", "--iterations", "3",
                 "--json", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "wrong elements 0" in done.stdout
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["header"]["ranks"] == 3
    assert {row["bytes"] for row in written["rows"]} == {12, 768, 49152}
    for row in written["rows"]:
        assert row.keys() >= KEYS
        assert row["op"] == operation and row["wrong"] == 0 and row["min_us"] <= row["time_us"] <= row["p99_us"]
        assert row["busbw_GBs"] == pytest.approx(row["algbw_GBs"] * factor)
        assert row["algbw_GBs"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int32"])
def test_every_dtype_is_measured(dtype, tmp_path):
    done = bench(2, "allreduce", "--algorithm", "ring,shared,auto", "--dtype", dtype, "--max-bytes", "4K", "--iterations", "2",
                 cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f" {dtype}  ") == 3


def test_wire_formats_are_measured_beside_the_algorithms(tmp_path):
    done = bench(2, "allreduce", "--algorithm", "ring", "--wire", "fp16,bf16,int8,topk:0.1,powersgd:2", "--max-bytes", "16K",
                 "--iterations", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("fp16", "bf16", "int8", "topk", "powersgd"):
        assert done.stdout.count(f"wire {name} ") == 2
    assert "wrong elements 0" in done.stdout


def test_a_wrong_element_is_counted_and_is_a_failure(tmp_path):
    code = ("from mpitrain.collectives import algorithms, ring; algorithms.ALL_REDUCE['ring'] = ring.all_gather\n"
            "from mpitrain.cli import main; main(['bench', 'allreduce', '--algorithm', 'ring', '--max-bytes', '4K'])")
    done = subprocess.run(["mpirun", "-n", "2", sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "wrong elements 2048" in done.stdout


def test_what_was_measured_survives_an_interruption(tmp_path):
    process = subprocess.Popen([*PROGRAM, "launch", "-n", "2", "--", "bench", "allreduce", "--iterations", "20", "--sweeps", "99",
                                "--json", "rows.json"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows, deadline = tmp_path / "rows.json", time.monotonic() + 60
    while not rows.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    assert process.wait(timeout=20) != 0
    assert time.monotonic() - asked < 10
    assert json.loads(rows.read_text())["rows"]


@pytest.mark.parametrize(("words", "message"), [
    (["--algorithm", "rign"], "allreduce algorithm must be one of ring, halving-doubling"),
    (["--dtype", "float8"], "dtype must be one of float32"),
    (["--buffers", "gpu"], "buffers must be one of window, plain"),
    (["--wire", "fp8"], "wire is one of none, fp16, bf16, int8"),
    (["--wire", "fp16", "--dtype", "int32"], "--wire is for allreduce of float32"),
    (["--min-bytes", "many"], "is no number of bytes"),
    (["--tuning", "nothing.json"], "nothing.json cannot be read"),
])
def test_a_wrong_option_is_one_message_and_exit_code_2(words, message, tmp_path):
    done = bench(2, "allreduce", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr


def test_fit_writes_what_auto_then_reads(tmp_path):
    done = bench(2, "fit", "--max-bytes", "16K", "--sweeps", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sizes left out: predicted within" in done.stdout
    done = bench(2, "allreduce", "--algorithm", "auto", "--tuning", "tuning.json", "--max-bytes", "16K", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "auto (" in done.stdout
