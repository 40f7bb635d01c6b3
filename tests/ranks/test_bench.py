"""Measuring, without a clock to trust: what ran, where, and what a fit learns from it."""

import os

import numpy as np
import pytest

from mpitrain.bench.fit import check, fit, median_of_sweeps
from mpitrain.bench.sweep import Request, dtype_of, sizes, sweep, wrong_elements
from mpitrain.bench.table import check_writable
from mpitrain.collectives.choose import candidates
from mpitrain.collectives.tuning import DEFAULT
from mpitrain.collectives.wire import Wire, parse_wire
from mpitrain.errors import ConfigError
from mpitrain.kernels.loader import Kernels
from mpitrain.transport.threads import run_ranks

MACHINE = {"hosts": 1, "cores": 2}


def request(*algorithms, most=1 << 12, buffers=("window", "plain"), **more):
    return Request("allreduce", algorithms, sizes(64, most, 4), np.dtype("float32"), 2, 1, buffers, 1, **more)


def rows_of(n, asked, hosts=None):
    """What rank 0 yields; all ranks yield the same."""
    everyone = run_ranks(n, lambda transport: list(sweep(transport, asked, DEFAULT)), hosts=hosts)
    assert all(repr(rows) == repr(everyone[0]) for rows in everyone)
    return everyone[0]


def test_on_the_simulator_our_kernels_reduce_and_code(monkeypatch):
    launched, launch = set(), Kernels.launch

    def noted(self, name, *words, **more):
        launched.add(name)
        return launch(self, name, *words, **more)

    monkeypatch.setattr(Kernels, "launch", noted)
    rows = rows_of(2, request("ring", buffers=("plain",), device="cuda-sim", wires=[parse_wire("int8")]))
    assert all(row.wrong == 0 for row in rows)
    on_device = set(launched)
    launched.clear()
    rows_of(2, request("ring", buffers=("plain",), wires=[parse_wire("int8")]))
    assert on_device >= {"add_into", "encode_int8", "decode_int8"} and not launched


def test_between_hosts_there_is_no_window_and_links_are_fitted():
    hosts = ("a", "b", "c")
    rows = median_of_sweeps(rows_of(3, request(*candidates(hosts, True), "star"), hosts))
    assert {row.buffers for row in rows} == {"plain"}
    found = fit(MACHINE | {"hosts": 3}, hosts, rows)
    assert list(found.plans[3]) == ["plain"] and list(found.whole[3]["plain"]) == ["native"]
    default = next(iter(DEFAULT.plans.values()))["plain"]
    assert all(found.plans[3]["plain"][knot][3:5] != default[knot][3:5] for knot in default)
    assert list(check(found, hosts, rows)) == ["plain"]


def test_what_cannot_run_is_refused_by_name_and_left_out_of_all():
    asked = request(most=64, buffers=("plain",))
    assert {row.algorithm for row in rows_of(2, asked, "ab")} >= {"ring", "hierarchical", "native", "auto"}
    assert "shared" not in {row.algorithm for row in rows_of(2, asked, "ab")}
    with pytest.raises(ConfigError, match="allreduce algorithm shared needs all ranks on one host"):
        rows_of(2, request("ring", "shared"), "ab")


def test_sums_that_a_short_dtype_must_round_are_not_wrong():
    asked = request("ring", most=256, buffers=("plain",))._replace(dtype=dtype_of("bfloat16"))
    assert all(row.wrong == 0 for row in rows_of(16, asked))

    def wrong(transport, found, right):
        return wrong_elements(transport, *(np.array(values).astype(dtype_of("bfloat16")) for values in (found, right)),
                              Wire("none"))

    assert run_ranks(1, wrong, [256, 257, 12], [256, 300, 13]) == [2], "exact up to 256, near beyond"
    assert run_ranks(1, wrong, [np.nan, np.inf, -300], [300, 300, 300]) == [3]


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "rows.json")
    with pytest.raises(ConfigError, match="it is a device or a pipe"):
        check_writable(tmp_path / "rows.json")
