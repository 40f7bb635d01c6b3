"""Compilations of kernels are progress of a rank, in its watchdog and in its trace."""

import threading
import time

import numpy as np

from mpitrain.machine.compiling import compiling
from mpitrain.run import watchdog
from mpitrain.trace.recorder import COMPUTE, Recorder
from mpitrain.trace.timeline import TRACE, described, read_timeline, trace_file
from tests.processes import SECONDS

STALL = 0.2


def watched(monkeypatch):
    """A watchdog, and an event that is set when the watchdog would end the process."""
    ended = threading.Event()
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: ended.set())
    return watchdog.Watchdog(0, STALL), ended


def test_a_compilation_is_progress(monkeypatch):
    one, ended = watched(monkeypatch)
    with compiling("gemm.cu"):
        assert not ended.wait(5 * STALL)
    assert ended.wait(SECONDS)
    one.close()


def test_a_compilation_that_never_ends_is_a_stall(monkeypatch):
    monkeypatch.setattr(watchdog, "COMPILING", STALL)
    one, ended = watched(monkeypatch)
    with compiling("gemm.cu"):
        assert ended.wait(SECONDS)
    one.close()


def test_other_ranks_see_a_compilation_in_the_trace(monkeypatch, tmp_path):
    (tmp_path / TRACE).mkdir()
    recorder = Recorder()
    recorder.facts(rank=0, ranks=1, host="node0")
    one, ended = watched(monkeypatch)
    one.traces(tmp_path, recorder)
    late = time.monotonic() + SECONDS
    with compiling("gemm.cu"):
        while recorder.newest < 6 and time.monotonic() < late:
            ended.wait(STALL)
    one.close()
    recorder.keep(trace_file(tmp_path, 0))
    (trace,) = read_timeline(tmp_path).traces
    assert len(trace.records) > 5 and np.all(trace.records["kind"] == COMPUTE)
    assert {described(trace, one) for one in trace.records} == {"compiling gemm.cu"}
    assert np.all(trace.records["end"] > 0)


def test_a_closed_watchdog_observes_no_compilation(monkeypatch):
    one, ended = watched(monkeypatch)
    one.close()
    with compiling("gemm.cu"):
        time.sleep(0)
    assert not ended.is_set()
