"""Measuring, without a clock to trust: what ran, where, and what a fit learns from it."""

import os
import threading
import time
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.cli.bench.collectives import OPERATIONS, measure_and_fit, measure_collective
from mpitrain.cli.bench.collectives import command as bench
from mpitrain.cli.terminal.progress import unmeasured
from mpitrain.collectives.engine.arithmetic import parse_wire
from mpitrain.collectives.selection.algorithm import Topology
from mpitrain.collectives.selection.cost_model import candidates
from mpitrain.collectives.selection.tuning import DEFAULT, read_tuning, write_tuning
from mpitrain.config import parse
from mpitrain.errors import ConfigError
from mpitrain.files import check_writable
from mpitrain.kernels.loader import Kernels
from mpitrain.tools.bench.collectives import fit as fitting
from mpitrain.tools.bench.collectives import sweep as sweeping
from mpitrain.tools.bench.collectives.fit import all_spoilt, check, checked, fit, median_of_sweeps
from mpitrain.tools.bench.collectives.operations import error_norm, wrong_elements, wrong_replicas
from mpitrain.tools.bench.collectives.sweep import (
    Sweep,
    SweepRequest,
    dtype_of,
    is_long_enough,
    sizes,
    starting_line,
)
from mpitrain.transport import native
from mpitrain.transport.native import native_all_reduce
from mpitrain.transport.threads import run_ranks

MACHINE = {"hosts": 1, "cores": 2}

GUESSES = (
    "No network measurements: algorithm auto guesses. Run `mpitrain launch -n 2 -- bench fit` on these "
    "2 hosts"
)


def request(*algorithms, most=1 << 12, buffers=("window", "plain"), **more):
    return SweepRequest(
        "allreduce", algorithms, sizes(64, most, 4), np.dtype("float32"), 2, 1, buffers, 1, **more
    )


def rows_of(n, asked, hosts=None):
    """What rank 0 yields; all ranks yield the same."""
    everyone = run_ranks(n, lambda transport: list(Sweep(transport, asked, DEFAULT)), hosts=hosts)
    assert all(repr(rows) == repr(everyone[0]) for rows in everyone)
    return everyone[0]


@pytest.mark.compile
def test_on_the_simulator_our_kernels_reduce_and_code(monkeypatch):
    launched, launch = set(), Kernels.launch

    def noted(self, name, *words, **more):
        launched.add(name)
        return launch(self, name, *words, **more)

    monkeypatch.setattr(Kernels, "launch", noted)
    asked = request("ring", buffers=("plain",), wires=[parse_wire("int8")])
    assert all(row.wrong == 0 for row in rows_of(2, asked._replace(device="cuda-sim")))
    on_device = set(launched)
    launched.clear()
    rows_of(2, asked)
    assert on_device >= {"add_into", "encode_int8", "decode_int8"} and not launched


def test_a_fit_learns_nothing_from_spoilt_rows_and_says_how_many():
    """One algorithm's rows of one sweep are spoilt, then all of one class of memory."""
    measured = rows_of(2, request(*candidates(Topology("aa")), most=1 << 16))
    rows = [row._replace(min_us=0.9 * row.time_us) for row in measured]
    rings = [row for row in rows if row.algorithm == "ring"]
    spoilt = [row._replace(time_us=1e6 * row.time_us, sweep=2) for row in rings]
    assert repr(median_of_sweeps([*rows, *spoilt])) == repr(median_of_sweeps(rows))
    said = checked(MACHINE, "aa", [*rows, *spoilt])
    left_out = f"~ {len(spoilt)} of {len(rows) + len(spoilt)} rows are left out: their median is"
    assert said[0] == f"{left_out} above 2 times the fastest run"
    assert said[1:] == checked(MACHINE, "aa", rows)
    every = {row.algorithm for row in rows}
    for lost in ({"ring"}, every - {"shared", "native"}, every):
        noisy = [
            row._replace(min_us=0.1 * row.time_us) if row.algorithm in lost else row for row in rows
        ]
        assert len(checked(MACHINE, "aa", noisy)) == (1 if "shared" in lost else 3), lost
    assert all_spoilt(rows) == [] and all_spoilt(noisy) == ["plain", "window"]


def test_between_hosts_there_is_no_window_and_links_are_fitted():
    hosts = ("a", "b", "c")
    rows = median_of_sweeps(rows_of(3, request(*candidates(Topology(hosts)), "star"), hosts))
    assert {row.buffers for row in rows} == {"plain"}
    found = fit(MACHINE | {"hosts": 3}, hosts, rows)
    network = found.levels["network"]
    assert list(network.plans[3]) == ["plain"] and list(network.whole[3]["plain"]) == ["native"]
    default = next(iter(DEFAULT.levels["host"].plans.values()))["plain"]
    assert all(network.plans[3]["plain"][knot][3:5] != default[knot][3:5] for knot in default)
    assert list(check(found, hosts, rows)) == ["plain"]


def test_bench_fit_measures_the_ranks_of_a_host_alone_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fitting, "is_spoilt", lambda row: False)
    words = ["--out", str(tmp_path / "tuning.json"), "--max-bytes", "128", "--sweeps", "1"]
    options = bench.commands["fit"].make_context("fit", words).params
    run_ranks(5, measure_and_fit, options, hosts="aabbc")
    levels = read_tuning(tmp_path / "tuning.json").levels
    ranks = {
        name: {n: [*memories] for n, memories in at.plans.items()} for name, at in levels.items()
    }
    assert ranks == {"host": {2: ["window", "plain"]}, "network": {5: ["plain"]}}
    whole = levels["host"].whole[2]
    assert "native" in whole["plain"] and "shared" in whole["window"]
    printed = capsys.readouterr().out
    assert all(f"sweep 1 of 1: {level} written to" in printed for level in levels)


def test_what_cannot_run_is_refused_by_name_and_left_out_of_all():
    asked = request(most=64, buffers=("plain",))
    found = {row.algorithm for row in rows_of(2, asked, "ab")}
    assert found >= {"ring", "hierarchical", "native", "auto"} and "shared" not in found
    with pytest.raises(ConfigError, match="allreduce algorithm shared needs"):
        rows_of(2, request("ring", "shared"), "ab")


def test_mpi_s_own_is_measured_and_checked_beside_every_collective_of_ours(monkeypatch):
    """A library that leaves a wrong number in one chunk is caught."""
    peers = ("broadcast", "reduce", "reduce-scatter", "all-gather", "all-to-all")

    def rows(operation, dtype="float32", size=3):
        asked = request(most=1 << 10)._replace(operation=operation, dtype=dtype_of(dtype))
        return [row for row in rows_of(size, asked) if row.algorithm == "native"]

    for operation in peers:
        found = rows(operation)
        assert {row.buffers for row in found} == {"window", "plain"} and len(found) == 6, operation
        assert {(row.wrong, row.chosen) for row in found} == {(0, "native")}, operation
        assert all(np.isnan(row.predicted_us) for row in found), operation
        assert all(row.wrong == 0 for row in rows(operation, size=1)), operation
    can_sum = {operation: bool(rows(operation, "bfloat16")) for operation in peers}
    assert can_sum == dict.fromkeys(peers, True) | {"reduce": False, "reduce-scatter": False}
    assert not rows("sendrecv")
    right = native._collected
    monkeypatch.setattr(native, "_collected", lambda *words: right(*words) + (words[2] == 0))
    for operation in peers:
        parts = 3 if operation == "reduce-scatter" else 1
        assert all(row.wrong == row.count // parts for row in rows(operation)), operation


def test_sums_that_a_short_dtype_must_round_are_not_wrong():
    asked = request("ring", most=256, buffers=("plain",))._replace(dtype=dtype_of("bfloat16"))
    assert all(row.wrong == 0 for row in rows_of(16, asked))

    def wrong(transport, *both):
        return wrong_elements(transport, *np.array(both).astype(dtype_of("bfloat16")))

    exact_up_to_256 = [256, 257, 12], [256, 300, 13]
    assert run_ranks(1, wrong, *exact_up_to_256) == [2]
    assert run_ranks(1, wrong, [np.nan, np.inf, -300], [300, 300, 300]) == [3]


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "rows.json")
    with pytest.raises(ConfigError, match="it is a device"):
        check_writable(tmp_path / "rows.json")


DELAY, APART = 0.1, 100.0
"""Seconds: what one rank hears late, and what the clocks of two ranks differ by."""


def starts(transport, clock, ready):
    """When this rank starts each of several runs, if rank 1 leaves every barrier and reduction of the library's late."""
    clock.ahead = APART * transport.rank
    barrier = transport.barrier

    def late():
        barrier()
        time.sleep(DELAY * (transport.rank == 1))

    transport.barrier = late
    go, found = ready(transport), []
    for _ in range(7):
        go()
        found.append(time.perf_counter())
    return found


def test_ranks_on_several_hosts_start_at_one_instant(monkeypatch):
    clock = threading.local()
    ahead = SimpleNamespace(perf_counter=lambda: time.perf_counter() + clock.ahead)
    ahead.sleep = time.sleep
    monkeypatch.setattr(sweeping, "time", ahead)

    def late(transport, *words):
        native_all_reduce(transport, *words)
        time.sleep(DELAY * (transport.rank == 1))

    monkeypatch.setattr(sweeping, "native_all_reduce", late)

    def skew(hosts, ready):
        first, second = run_ranks(2, starts, clock, ready, hosts=hosts)
        return median(abs(a - b) for a, b in zip(first, second, strict=True))

    assert skew("ab", lambda transport: transport.barrier) > 0.8 * DELAY
    assert skew("ab", starting_line) < 0.5 * DELAY

    def is_barrier(transport):
        return starting_line(transport) == transport.barrier

    assert run_ranks(2, is_barrier) == [True, True], "within a host that will do"


def test_sizes_stop_where_time_grows_with_them_or_runs_are_too_long():
    assert not is_long_enough(0.01, 0.005, 2), "short yet"
    assert not is_long_enough(0.08, 0.06, 2), "latency still counts"
    assert is_long_enough(0.08, 0.042, 2) and is_long_enough(0.6, 0.15, 4)
    assert is_long_enough(3.0, float("inf"), 1)


@pytest.mark.parametrize("bucket, sizes", [(64, (64,)), (300, (64, 1024)), (25e6, (64, 4096))])
def test_a_request_that_stops_goes_on_at_the_largest_bucket_in_every_sweep(
    monkeypatch, bucket, sizes
):
    monkeypatch.setattr(sweeping, "LONGEST", 0.0)
    monkeypatch.setattr(sweeping, "BUCKET", bucket)
    rows = rows_of(2, request("ring", "tree", buffers=("plain",), stops=True)._replace(sweeps=2))
    assert [(row.sweep, row.bytes, row.algorithm) for row in rows] == [
        (number, size, name) for number in (1, 2) for size in sizes for name in ("ring", "tree")
    ]
    assert len(rows_of(2, request("ring", buffers=("plain",)))) == 4


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1.0, 1 + 1e-12, -2.0])
def test_sizes_that_would_never_end_are_refused(factor):
    law = r"Sizes grow by a factor of 1.01 or more, but this is .*\n.*--factor"
    with pytest.raises(ConfigError, match=law):
        sizes(64, 1024, factor)


def test_a_lossy_row_tells_how_far_the_sum_is_off():
    wires = [parse_wire("int8"), parse_wire("topk:0.1")]
    rows = rows_of(3, request("ring", most=1 << 14, buffers=("plain",), wires=wires))
    ring, int8, topk = (
        [row.error for row in rows if row.algorithm == name]
        for name in ("ring", "wire int8", "wire topk:0.1")
    )
    assert all(np.isnan(ring)) and all(1e-3 < error < 2e-2 for error in int8)
    assert all(0.5 < error < 1 for error in topk), "a tenth of the elements, of one run"
    assert all(row.wrong == 0 for row in rows)
    assert error_norm(np.float32([3, 0]), np.float32([3, 4])) == pytest.approx(0.8)


def test_replicas_that_differ_are_counted_and_not_their_elements():
    def wrong(transport, values):
        return wrong_replicas(transport, np.float32(values[transport.rank]))

    assert run_ranks(3, wrong, [[1, 2], [1, 2], [1, 2]]) == [0] * 3
    assert run_ranks(3, wrong, [[1, 2], [7, 8], [1, 2]]) == [1] * 3
    assert run_ranks(3, wrong, [[0, 2], [-0.0, 2], [5, 6]]) == [2] * 3, "bits, not values"
    assert run_ranks(2, wrong, [[np.nan], [np.nan]]) == [2] * 2


@pytest.mark.parametrize(
    ("hosts", "tuned", "said"), [("ab", False, 1), ("aa", False, 0), ("ab", True, 0)]
)
def test_predictions_made_without_having_measured_the_links_are_said_to_be(
    hosts, tuned, said, tmp_path, capsys
):
    network = DEFAULT._replace(levels={"network": DEFAULT.levels["host"]})
    write_tuning(tmp_path / "tuning.json", network)
    words = ["--algorithm", "ring", "--max-bytes", "4K", "--iterations", "1"]
    words += ["--tuning", str(tmp_path / "tuning.json")] * tuned
    options = bench.commands["allreduce"].make_context("allreduce", words).params
    assert run_ranks(2, measure_collective, "allreduce", options, hosts=hosts) == [0, 0]
    assert capsys.readouterr().out.count(GUESSES) == said


def test_an_option_is_there_only_where_it_applies():
    options = {name: {option.name for option in bench.commands[name].params} for name in OPERATIONS}
    assert [name for name in OPERATIONS if "wire" in options[name]] == ["all-reduce"]
    hidden = {name for name, each in bench.commands.items() if each.hidden}
    assert hidden == {"allreduce", "sendrecv", "train", "generate"} and not hidden & {
        *bench.list_commands(None)
    }
    assert bench.list_commands(None)[-3:] == ["gemm", "kernels", "transactions"]


def test_auto_says_when_its_links_were_not_measured():
    said = unmeasured(parse({}), "ab")
    assert said == f"{GUESSES}, and name its file in replication.tuning"
    assert not unmeasured(parse({}), "aa")
    for key, value in (("algorithm", "ring"), ("tuning", "tuning.json")):
        assert not unmeasured(parse({"replication": {key: value}}), "ab")
