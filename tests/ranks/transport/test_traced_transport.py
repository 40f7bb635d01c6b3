"""A transport that is recorded: it obeys the laws of transports, and its trace says what happened, when, on one clock."""

import json
import shutil
import sys
import tempfile
import threading
import time
from statistics import median

import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.cli.session import mpi_session
from mpitrain.layers.base import READING, Unit
from mpitrain.machine import process
from mpitrain.machine.backend import Arena
from mpitrain.machine.cuda import CudaBackend
from mpitrain.pipeline.pipeline import Stage
from mpitrain.run.run_dir import configuration
from mpitrain.tools.report.schedule_comparison import compare, what_was_predicted
from mpitrain.tools.report.time_breakdown import BUBBLE, shares
from mpitrain.trace.recorder import (
    COMPUTE,
    DEVICE,
    FORWARD,
    RECEIVE,
    REDUCTION,
    SEND,
    WAIT,
    Recorder,
)
from mpitrain.trace.startup import left
from mpitrain.trace.timeline import described, on_the_clock_of_rank_0, read_timeline, read_trace
from mpitrain.transport import mpi
from mpitrain.transport.clocks import Clocks
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy
from tests.laws.transport import TransportLaws, laws_of
from tests.runs import go

LAST = "law_a_message_of_another_size_is_an_error_at_its_receiver"  # after it threads carry no more; it knows them by their type


def test_what_is_recorded_obeys_the_laws_of_transports():
    def obey(transport):
        transport.record(Recorder())
        for name in laws_of(TransportLaws):
            if name != LAST:
                getattr(TransportLaws(), name)(transport)

    run_ranks(3, obey)


def test_sleeping_layers_appear_in_the_trace_to_a_millisecond(tmp_path):
    truth = []

    class Sleepy:
        def output_shape(self, shape):
            return shape

        def forward(self, w, x, now, arena):
            started = time.perf_counter()
            time.sleep(0.005 * len(truth))
            truth.append((started, time.perf_counter()))
            return x, None

    class Alone:
        def open(self, unit, part):
            return None

        def close(self, unit, part):
            pass

        reducer = None

        @property
        def store(self):
            return self

    recorder = Recorder()
    stage = Stage([Unit("sleepy", Sleepy())], Alone(), Arena(), recorder=recorder)
    for micro in range(8):
        stage.forward(micro, READING, np.zeros(1))
    recorder.keep(tmp_path / "trace")
    records = read_trace(tmp_path / "trace").records
    assert records["micro"].tolist() == list(range(8)) and (records["kind"] == COMPUTE).all()
    errors = [
        max(abs(start - record["start"]), abs(end - record["end"]))
        for (start, end), record in zip(truth, records, strict=True)
    ]
    assert median(errors) < 1e-3, (
        errors
    )  # a busy machine may take a thread away in between, now and then


def test_a_trace_starts_early_and_moves_into_the_run_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process, "limit_blas_threads", lambda: None)
    monkeypatch.setattr("mpitrain.cli.report.find_spec", lambda name: None)
    said = []

    def begin(own):
        def connect(thread_level, meanwhile):
            said.append(CliRunner().invoke(commands, ["report", str(left()[0])]).output)
            shutil.rmtree(left()[0] / "report")
            return own

        monkeypatch.setattr(mpi, "join_world", connect)
        with mpi_session(does_trace=lambda: True) as transport:
            transport.gather_text("words")
            transport.recorder.keep(tmp_path / "trace")

    run_ranks(1, begin)
    assert "It had no run" in said[0] and ": finding the other" in said[0] and left() == []
    trace = read_trace(tmp_path / "trace")
    assert [described(trace, record) for record in trace.records] == [
        "finding the other ranks",
        "words of all ranks",
        "a barrier",
    ]


def test_gpu_work_is_timed_by_events_without_a_wait(monkeypatch, tmp_path):
    """The host launches three kernels of 20 ms within a moment; the second step begins when the GPU has nothing to do."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    backend, recorder, stream, truth = CudaBackend(), Recorder(), cupy.get_current_stream(), []
    recorder.computes_on(backend.mark)
    before = len(cupy.log())
    for step in range(2):
        with recorder.stepping(step):
            for micro in range(3):
                span = recorder.compute(recorder.name("a layer"), FORWARD, 0, micro)
                truth.append(stream.computes(0.02))
                recorder.end(span)
            assert ("synchronize",) not in cupy.log()[before:]
            time.sleep(0.1)  # the host reads the result of the step
    with recorder.pausing("evaluation"):
        pass
    recorder.keep(tmp_path / "trace")
    records = read_trace(tmp_path / "trace").records
    found = records[records["kind"] == DEVICE]
    assert found["step"].tolist() == [0, 0, 0, 1, 1, 1] and found["micro"].tolist() == [0, 1, 2] * 2
    errors = np.abs(np.stack([found["start"], found["end"]], 1) - truth)
    assert np.median(errors) < 1e-3, errors  # as above


def test_clocks_of_hosts_that_differ_and_drift_are_put_on_that_of_rank_0():
    """A second of the world passes whenever a clock is read, so that the way there is as long as the way back."""
    truth, read = [0.0], threading.Lock()
    wrong = {"a": (0.0, 0.0), "b": (1234.5, 3e-4), "c": (-77.0, -2e-3)}

    def errors(transport):
        skew, drift = wrong[transport.hosts[transport.rank]]

        def clock():
            with read:
                truth[0] += 1.0
                return truth[0] * (1 + drift) + skew

        clocks, found = Clocks(transport, clock), []
        for _ in range(3):
            found.append(clocks.measure())
            transport.barrier()
        asked = np.array([0.0, 100.0, truth[0], 2000.0])  # before, between and after
        return on_the_clock_of_rank_0(asked * (1 + drift) + skew, found) - asked

    np.testing.assert_allclose(run_ranks(4, errors, hosts=("a", "b", "b", "c")), 0, atol=1e-8)


def test_traces_name_messages_and_the_slow_rank_and_sum_to_the_whole(book, tmp_path):
    go(
        3,
        [
            *book,
            "replication.algorithm=ring",
            "replication.bucket_mb=0.001",
            "batch.micro_batches=2",
            "run.delay=1:40",
        ],
    )
    timeline = read_timeline(tmp_path / "run")
    found = shares(timeline)
    assert found.slowest == 1 and found.steps == range(1, 6)
    assert (found.seconds > -1e-9).all()
    for rank, trace in enumerate(timeline.traces):
        assert trace.facts["rank"] == rank and trace.facts["place"] == {
            "tp": 0,
            "dp": rank,
            "pp": 0,
        }
        of = {
            kind: [
                described(trace, record)
                for record in trace.records[trace.records["kind"] == kind]
                if record["step"] == 3
            ]
            for kind in (COMPUTE, WAIT, REDUCTION, SEND, RECEIVE)
        }
        assert {
            "forward of embedding, micro-batch 0",
            "backward of head, micro-batch 1",
            "the loss, micro-batch 1",
            "its rows",
            "run.delay",
            "update of the parameters",
        } <= set(of[COMPUTE])
        assert of[WAIT] == ["the sums of gradients", "all-reduce of the control message"]
        assert "all-reduce of bucket 0" in of[REDUCTION] and len(of[SEND]) == len(of[RECEIVE]) > 4
        assert any(
            said.startswith(f"send to rank {(rank + 1) % 3}: all-reduce of bucket 0, ")
            for said in of[SEND]
        )
        assert (trace.records["end"] > 0).all()
    assert not [*what_was_predicted(tmp_path / "run", timeline, range(1, 3))], "it has no pipeline"
    go(3, [*book, "run.trace=false", f"run.out={tmp_path / 'without'}"])
    assert not (tmp_path / "without" / "trace").exists()


@pytest.mark.slow
def test_a_pipelines_trace_names_its_messages_and_bubble(book, tmp_path):
    # A late first stage lets the second one wait, however threads take turns.
    go(2, [*book, "layout.pp=2", "batch.micro_batches=3", "run.delay=0:30"])
    timeline = read_timeline(tmp_path / "run")
    found = shares(timeline)
    assert found.seconds[1, BUBBLE] > 0
    compared = compare(timeline, found.steps, configuration(tmp_path / "run"))
    assert 0 < compared.measured_s * len(found.steps) <= found.seconds.sum(1).max(), (
        "the evaluation at the end is in no step"
    )
    first, last = (
        [
            described(trace, record)
            for record in trace.records[trace.records["kind"] == SEND]
            if record["step"] == 3
        ]
        for trace in timeline.traces
    )
    pytest.importorskip("bokeh")
    shown = CliRunner().invoke(commands, ["report", str(tmp_path / "run")])
    assert (
        shown.exit_code == 0
        and "Schedule 1f1b on 2 stage(s) with 3 micro-batch(es): " in shown.output
    ), shown.output
    folder = tmp_path / "run" / "report"
    events = json.loads((folder / "perfetto.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1} and all(
        event.get("dur", 0) >= 0 for event in events
    )
    assert sum(event["name"] == "step 4" for event in events) == 2
    page = (folder / "report.html").read_text()
    assert "<script src" not in page and "<link" not in page and "steps 2 to 6" in page
    for micro in range(3):
        for sent, begins in (
            (first, "send to rank 1: activation, "),
            (last, "send to rank 0: gradient, "),
        ):
            assert (
                sum(
                    said.startswith(begins) and said.endswith(f"micro-batch {micro}")
                    for said in sent
                )
                == 1
            )


@pytest.mark.parametrize(
    "ranks, settings",
    [
        (1, []),
        (5, ["replication.zero=3"]),
        (2, ["layout.cp=2", "model.heads=2"]),
        (2, ["device.kind=cuda-sim"]),
        *(
            (3, [f"replication.{key}" for key in keys])
            for keys in (
                ["mode=local", "period=2"],
                ["mode=gossip", "period=2"],
                ["mode=master"],
                ["mode=server"],
                ["mode=server", "update=async"],
                ["mode=server", "update=bounded"],
            )
        ),
    ],
    ids=lambda value: (
        "-".join(setting.partition("=")[2] for setting in value)
        if isinstance(value, list)
        else None
    ),
)
@pytest.mark.slow
def test_in_every_mode_the_breakdown_sums_to_the_whole(
    ranks, settings, monkeypatch, book, tmp_path
):
    monkeypatch.setattr("mpitrain.cli.report.find_spec", lambda name: None)  # pictures take seconds
    go(ranks, [*book, "run.steps=4", *settings])
    (tmp_path / "run" / "config.toml").rename(tmp_path / "run" / "gone")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    timeline = read_timeline(moved)
    found = shares(timeline)
    assert (found.seconds > -1e-9).all() and not timeline.missing
    for trace in timeline.traces:
        for record in trace.records[
            (trace.records["kind"] == WAIT) | (trace.records["kind"] == SEND)
        ]:
            assert described(trace, record) and "message of tag" not in described(trace, record), (
                described(trace, record)
            )
        assert (DEVICE in trace.records["kind"]) == ("device.kind=cuda-sim" in settings)
        computed = trace.records[trace.records["kind"] == COMPUTE]
        has_trained = any(described(trace, record).startswith("the loss") for record in computed)
        # An asynchronous worker that starts late finds that the other has drawn all tickets.
        may_idle = trace.facts["place"] is None or "replication.update=async" in settings
        assert has_trained or may_idle
        assert trace.facts["peak_activation_bytes"] > 0 or not has_trained
    said = CliRunner().invoke(commands, ["report", str(moved)])
    assert said.exit_code == 0 and said.output.count(" before: ") == ranks, said.output
    assert f"{moved}/report/perfetto.json is for https://ui.perfetto.dev" in said.output
    assert (
        "It has no metrics." in said.output
        and "predicted" not in said.output
        and "100.0" in said.output
    )
