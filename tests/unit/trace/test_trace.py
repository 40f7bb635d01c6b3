"""Traces and what is said of them: rings that overwrite, waits whose cause is known, and who was waited for."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.config import parse, with_settings
from mpitrain.errors import ConfigError
from mpitrain.pipeline.schedules import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    fused_at_the_input,
    plan_of,
    with_messages,
)
from mpitrain.pipeline.simulate import Cost, simulate
from mpitrain.tools.report.schedule_comparison import compare
from mpitrain.tools.report.text import time_table, what_each_did_last, where_the_time_went
from mpitrain.tools.report.time_breakdown import (
    BETWEEN,
    BUBBLE,
    COMMUNICATION,
    COMPUTING,
    PAUSES,
    READING,
    WAITING,
    shares,
)
from mpitrain.trace.recorder import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    DEVICE,
    FORWARD,
    HEAD,
    RECEIVE,
    RECORD,
    SEND,
    UPDATE,
    Recorder,
    Ring,
)
from mpitrain.trace.timeline import read_timeline, read_trace, trace_file

RANKS = 3
PHASES = {
    Forward: FORWARD,
    Backward: BACKWARD,
    BackwardInput: BACKWARD_INPUT,
    BackwardWeight: BACKWARD_WEIGHT,
}


def test_a_trace_whose_file_another_one_takes_goes_on(tmp_path):
    recorders = Recorder(), Recorder()
    for recorder in recorders:
        recorder.keep(tmp_path / "rank-0")
    for recorder in recorders:  # a write to memory whose file was cut off would end the process
        recorder.end(recorder.compute(recorder.name("a layer")))
    assert len(read_trace(tmp_path / "rank-0").records) == 1


class Scripted:
    """A recorder whose clock stands still unless the script moves it; it is ahead of rank 0's by `skew`, and runs faster."""

    def __init__(self, rank, skew=0.0):
        self.now, self.skew = 100.0, skew
        self.recorder = Recorder(clock=lambda: self.now + self.skew * (1 + self.now / 1e4))
        self.recorder.facts(rank=rank, ranks=RANKS, host=f"host{rank}")
        for self.now in (200.0, 100.0):
            self.recorder.facts(clock=(self.recorder.clock(), self.now - self.recorder.clock()))

    def computes(self, seconds, what="a layer"):
        span = self.recorder.compute(self.recorder.name(what))
        self.now += seconds
        self.recorder.end(span)

    def waits(self, until, what="sums", peer=-1, message=0):
        wait = self.recorder.wait(self.recorder.name(what, range(RANKS)), peer, message)
        self.now = until
        self.recorder.go_on(wait)


def scripted(folder, script):
    """What `script(rank, recorder and clock, step)` makes of two steps that end with a sum of all."""
    (folder / "trace").mkdir()
    for rank in range(RANKS):
        one = Scripted(rank, skew=1000.0 * rank)
        for step in range(3):  # the first does not count
            one.now = 100.0 + 10 * step
            with one.recorder.stepping(step):
                script(rank, one, step)
        one.recorder.keep(trace_file(folder, rank))
    return read_timeline(folder)


def test_records_are_read_as_written_and_the_oldest_are_overwritten(tmp_path):
    recorder = Recorder(Ring(capacity=4), clock=iter(range(100)).__next__)
    first = recorder.begin(SEND, 0)
    for number in range(6):
        recorder.step = number
        span = recorder.begin(
            SEND, recorder.name("rows", (4, 2, 7)), 1, 10**5, 10**6, 4 << 33, 5, 6
        )
        if number != 3:
            recorder.end(span)
        if number == 2:
            recorder.keep(tmp_path / "trace")
    recorder.end(first)  # its place is that of the one that has not ended
    found = read_trace(tmp_path / "trace")
    assert found.names == [("", ()), ("rows", (4, 2, 7))]
    rows = found.records[["number", "step", "start", "end"]].tolist()
    assert rows == [(4, 2, 5, 6), (5, 3, 7, 0), (6, 4, 8, 9), (7, 5, 10, 11)]
    assert found.records[-1].tolist()[2:-1] == (4 << 33, 5, 5, 6, 10**6, 10**5, 1, SEND, 1)


def test_a_run_of_days_writes_more_records_than_their_numbers_have_values(tmp_path):
    ring = Ring(capacity=8)
    ring._next = itertools.count(2**32 - 3).__next__
    recorder = Recorder(ring)
    for recorder.step in range(5):
        recorder.go_on(recorder.wait(0, 1, recorder.begin(SEND, 0)))
    recorder.keep(tmp_path / "trace")
    found = read_trace(tmp_path / "trace").records
    steps = found["step"].tolist()
    assert steps == sorted(steps) and steps[-1] == 4
    assert found["nbytes"][-1] == found["number"][-2] < 10


def test_names_that_find_no_room_cost_their_records_nothing_but_the_name(tmp_path):
    recorder = Recorder(Ring(capacity=4))
    names = [recorder.name("x" * 1000 + str(number), range(1000)) for number in range(100)]
    recorder.keep(tmp_path / "trace")
    assert 50 < max(names) < 66 and names[-1] == 0
    assert len(read_trace(tmp_path / "trace").names) == max(names) + 1


def test_waits_within_a_wait_and_of_another_thread_do_not_count():
    times = iter([1.0, 4.0, 10.0, 11.0])
    waits = Recorder(clock=lambda: next(times))
    outer, inner = waits.wait(0), waits.wait(0, 1, 2)
    with ThreadPoolExecutor(1) as pool:
        waits.go_on(pool.submit(waits.wait, 0).result())
    waits.go_on(inner)
    waits.go_on(outer)
    assert waits.waited == 3.0
    waits.go_on(waits.wait(0))
    assert waits.waited == 4.0


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="There is no trace"):
        read_timeline(tmp_path)


def test_a_breakdown_has_true_seconds_and_names_the_slow_rank(tmp_path):
    """Ranks 0 and 1 compute 4 s, rank 2 30% longer; all then need 0.5 s for a sum, and rest 1 s in an evaluation."""

    def script(rank, one, step):
        one.computes(5.2 if rank == 2 else 4.0)
        one.waits(105.7 + 10 * step)
        one.computes(0.2, "its rows")
        one.now += 0.1  # nobody says what for
        with one.recorder.pausing("evaluation"):
            one.computes(1.0)

    timeline = scripted(tmp_path, script)
    found = shares(timeline)
    span = 17.0  # from the start of the second step to the end of the third
    expected = np.zeros((RANKS, 7))
    expected[:, [COMMUNICATION, READING, PAUSES]] = 1, 0.4, 2
    expected[:, COMPUTING], expected[:, WAITING] = (8, 8, 10.4), (2.4, 2.4, 0)
    expected[:, BETWEEN] = span - expected.sum(1)
    np.testing.assert_allclose(found.seconds, expected, atol=1e-9)
    assert found.steps == range(1, 3) and found.slowest == 2
    assert found.workers == [0, 1, 2]
    said = "\n".join(where_the_time_went(found, timeline))
    assert "2 on host2: 9.4%" in said
    assert "2 computes longest: 5200.0" in said


def test_a_server_has_its_role_in_the_table_and_is_no_idle_worker(tmp_path):
    """Worker 1 computes 30% longer than worker 0, and both wait; rank 2 serves, and mostly waits for them."""

    def script(rank, one, step):
        one.recorder.facts(place=None if rank == 2 else {"dp": rank, "tp": 0, "pp": 0})
        one.computes((4.0, 5.2, 0.1)[rank])
        one.waits(105.7 + 10 * step)

    timeline = scripted(tmp_path, script)
    found = shares(timeline)
    assert found.workers == [0, 1] and found.slowest == 1
    _, ranks, roles, computing, *more = where_the_time_went(found, timeline)
    assert ranks.split() == ["workers", "rank", "0", "rank", "1", "rank", "2"]
    assert roles.split() == ["worker", "worker", "server"]
    seconds = found.seconds[:2]
    share = 100 * seconds[:, COMPUTING].sum() / seconds.sum()
    assert computing.split()[:2] == ["computing", f"{share:.1f}"]
    assert more[-2].startswith("The workers waited longest for rank 1 on host1: ")
    longest = "Rank 1 computes longest: 5200.0 ms a step, 1.30 times the median of the other"
    assert more[-1] == f"{longest} workers."


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "server, seconds, said",
    [
        (2, (1.0, 1.0, 5.0), "2, a server, on host2:"),
        (None, (0.0, 0.0, 5.0), "Rank 2 computes longest: 5000.0 ms a step."),
    ],
)
def test_a_server_that_workers_wait_for_and_a_rank_that_computes_alone(
    server, seconds, said, tmp_path
):
    def script(rank, one, step):
        one.recorder.facts(place=None if rank == server else {"dp": rank, "tp": 0, "pp": 0})
        one.computes(seconds[rank])
        one.waits(105.7 + 10 * step)

    timeline = scripted(tmp_path, script)
    assert said in "\n".join(where_the_time_went(shares(timeline), timeline))


def test_who_waits_is_not_to_blame_but_whom_it_waits_for(tmp_path):
    """Rank 2 computes 3 s longer than the others. Rank 0 gets a message of rank 1, which first waits for one of rank 2."""

    def script(rank, one, step):
        recorder, base = one.recorder, 100.0 + 10 * step
        one.computes(1.0 if rank < 2 else 4.0)
        if rank == 1:
            message = recorder.begin(RECEIVE, recorder.name("rows"), peer=2, tag=6)
            one.waits(base + 4.0, "rows", peer=2, message=message)
            one.computes(0.5)
        if rank > 0:
            recorder.end(recorder.begin(SEND, recorder.name("rows"), peer=rank - 1, tag=4 + rank))
        if rank == 0:
            message = recorder.begin(RECEIVE, recorder.name("rows"), peer=1, tag=5)
            one.waits(base + 4.75, "rows", peer=1, message=message)
        one.now = base + 6

    found = shares(scripted(tmp_path, script))
    np.testing.assert_allclose(found.waited, [[0, 1, 6], [0, 0, 6], [0, 0, 0]], atol=1e-9)
    assert found.slowest == 2


def test_printed_shares_sum_to_exactly_100_however_they_are_rounded(tmp_path):
    def script(rank, one, step):
        for number in range(3):  # thirds of 10 s
            one.computes(10 / 9)
            one.waits(one.now + 10 / 9, f"sum {number}")
            one.now += 10 / 9

    timeline = scripted(tmp_path, script)
    lines = where_the_time_went(shares(timeline), timeline)
    _, *printed, total = [line.split()[-4:] for line in lines if line.startswith("  ")]
    assert total == ["100.0"] * 4
    for column in zip(*printed, strict=True):
        assert sum(round(10 * float(share)) for share in column) == 1000, printed


def test_only_waits_after_a_gpus_work_are_exposed(tmp_path):
    """The host launches for 1 s and waits 4 s for a sum; its GPU computes from 0.5 s to 4 s, twice over between 1 s and 2 s."""

    def script(rank, one, step):
        recorder, base, clock = one.recorder, one.now, one.recorder.clock()
        span = recorder.compute(recorder.name("a layer"), FORWARD, 0, 0)
        one.now += 1.0
        recorder.end(span)
        one.waits(base + 5.0)
        for start, end in ((0.5, 2.0), (1.0, 4.0)):
            fields = (0, step, -1, -1, 0, 0, recorder.name("a layer"), DEVICE, FORWARD)
            recorder._ring.write(clock + start, clock + end, *fields)

    found = shares(scripted(tmp_path, script))
    np.testing.assert_allclose(found.seconds[0, [COMPUTING, COMMUNICATION]], (8.0, 2.0), atol=1e-9)


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda data: b"", "is no trace."),
        (lambda data: data[:-100], "bytes, not as many as it was made with."),
        (lambda data: data[:1000], "bytes, not as many as it was made with."),
        (lambda data: b"mpitrain trace 9\n" + data[17:], "is a trace of another version of mpitr"),
        (lambda data: data[:60] + b"\xff" * 200 + data[260:], "does not say of what rank it is."),
        (lambda data: data.replace(b'"run": "this"', b'"run": "that"'), "is of another run."),
        (lambda data: None, "There is no trace of rank 1 in"),
    ],
)
def test_missing_traces_are_reported_and_others_give_last_actions(
    damage, said, monkeypatch, tmp_path
):
    monkeypatch.setattr("mpitrain.cli.report.find_spec", lambda name: None)  # pictures take seconds

    def script(rank, one, step):
        one.recorder.facts(run="this")
        one.computes(1.0)

    scripted(tmp_path, script)
    file = trace_file(tmp_path, 1)
    damaged = damage(file.read_bytes())
    file.unlink() if damaged is None else file.write_bytes(damaged)
    shown = CliRunner().invoke(commands, ["report", str(tmp_path)])
    assert shown.exit_code == 0
    for part in (said, "cannot be said without", "rank 0 on host0, ", "rank 2 on host2, "):
        assert part in shown.output
    assert "rank 1 on" not in shown.output


def test_records_that_are_garbage_are_left_out(tmp_path):
    scripted(tmp_path, lambda rank, one, step: one.computes(1.0))
    file, random = trace_file(tmp_path, 1), np.random.default_rng(0)
    data = bytearray(file.read_bytes())
    data[HEAD + RECORD.itemsize * 100 :] = random.bytes(len(data) - HEAD - RECORD.itemsize * 100)
    file.write_bytes(data)
    shown = CliRunner().invoke(commands, ["report", str(tmp_path)])
    assert shown.exit_code == 0 and "What each rank did" in shown.output, shown.output
    json.loads((tmp_path / "report/perfetto.json").read_text(), parse_constant=pytest.fail)


def test_an_idle_stage_is_in_a_bubble_and_not_in_communication(tmp_path):
    """Rank 0 computes 3 s before it sends an activation to rank 1, which gets it 0.25 s later."""

    def script(rank, one, step):
        recorder, name = one.recorder, one.recorder.name("activation", (0, 1))
        if rank == 0:
            one.computes(3.0)
            recorder.end(recorder.begin(SEND, name, peer=1, tag=5))
        if rank == 1:
            message = recorder.begin(RECEIVE, name, peer=0, tag=5)
            one.waits(103.25 + 10 * step, "activation", peer=0, message=message)
        one.now = 107.0 + 10 * step

    found = shares(scripted(tmp_path, script))
    np.testing.assert_allclose(
        found.seconds[1, [BUBBLE, COMMUNICATION, WAITING]], (6.0, 0.5, 0), atol=1e-9
    )
    np.testing.assert_allclose(found.waited, [[0, 0, 0], [6, 0, 0], [0, 0, 0]], atol=1e-9)


def test_each_rank_of_a_dead_run_is_said_to_have_done_what_it_did_not_end(tmp_path):
    (tmp_path / "trace").mkdir()
    for rank in range(RANKS):
        one = Scripted(rank)
        recorder = one.recorder
        recorder.step, one.now = 6, 100.0 + (rank + 1) % RANKS
        recorder.begin(0, 0)
        name = recorder.name("all-reduce of bucket 2", range(RANKS))
        recorder.begin(RECEIVE, name, peer=(rank + 1) % RANKS, nbytes=65536)
        if rank == 0:
            recorder.begin(COMPUTE, recorder.name("blocks.1.mlp"), 2, 1, 3)
        else:
            recorder.wait(recorder.name("the sums of gradients", range(RANKS)))
        recorder.keep(trace_file(tmp_path, rank))
    said = list(what_each_did_last(read_timeline(tmp_path)))
    assert said[1] == (
        "  rank 0 on host0, 1.000 s before: step 7, backward of blocks.1.mlp, micro-batch 3; "
        "under way: receive from rank 1: all-reduce of bucket 2, 65,536 bytes"
    )
    assert "2.000 s before: step 7," in said[3]
    assert said[-2] == "First to fall silent was rank 0."
    assert said[-1] == (
        "First divergence: rank 0 on host0 has not moved for 1 s: step 7, backward of "
        "blocks.1.mlp, micro-batch 3; rank 2 on host2 has waited for the sums of gradients for 2 "
        "s."
    )


def stages(folder, seconds, play, *settings, skew=0.0):
    """How two stages compare with their schedule; `play(stage, step, recorder and clock)` makes a step of so many seconds."""
    (folder / "trace").mkdir()
    for rank in range(2):
        one = Scripted(rank, skew=skew * rank)
        place, parts = {"tp": 0, "dp": 0, "pp": rank}, {rank: [f"part {rank}"]}
        one.recorder.facts(ranks=2, place=place, parts=parts)
        for step in range(3):
            one.now = seconds * step
            with one.recorder.stepping(step):
                play(rank, step, one)
        one.recorder.keep(trace_file(folder, rank))
    config = parse(with_settings({}, ["layout.pp=2", *settings]))
    return compare(read_timeline(folder), range(1, 3), config)


def test_sleeping_stages_take_the_simulated_time(tmp_path):
    """A run as the simulator sees it: 1f1b of 2 stages and 4 micro-batches, and backward takes twice as long as forward."""
    plan = plan_of("1f1b", 2, 4)
    costs = [Cost(1.0, 1.0, 1.0), Cost(1.5, 1.25, 1.25)]
    simulated = simulate(with_messages(fused_at_the_input(plan)), costs)

    def play(rank, step, one):
        for start, end, instruction in simulated.timeline[rank]:
            one.now = 100.0 * step + start
            name = one.recorder.name(f"part {rank}")
            span = one.recorder.compute(name, PHASES[type(instruction)], 0, instruction.micro)
            one.now = 100.0 * step + end
            one.recorder.end(span)
        one.now = 100.0 * step + simulated.makespan

    found = stages(tmp_path, 100.0, play, "batch.micro_batches=4", skew=50.0)
    np.testing.assert_allclose(found[3:], [simulated.makespan, simulated.bubble] * 2)
    assert found.predicted_bubble > 0.1
    assert str(found).startswith("Schedule 1f1b on 2 stage(s) with 4 micro-batch(es): ")


def test_of_a_stream_all_is_predicted_that_its_slowest_stage_computes(tmp_path):
    """Two micro-batches a step, and after each an update; the second stage takes 7 s of a step's 8, the first 6."""

    def play(rank, step, one):
        name = one.recorder.name(f"part {rank}")
        update = one.recorder.name("update of the parameters")
        for micro in range(2):
            for what, phase, number, seconds in (
                (name, FORWARD, micro, 1 + 0.5 * rank),
                (name, BACKWARD, micro, 1.5),
                (update, UPDATE, -1, 0.5),
            ):
                span = one.recorder.compute(what, phase, 0, number)
                one.now += seconds
                one.recorder.end(span)
        one.now = 8.0 * (step + 1)

    found = stages(tmp_path, 8.0, play, "batch.micro_batches=2", "pipeline.schedule=async")
    np.testing.assert_allclose(found[3:], [7, 1 - 6.5 / 7, 8, 1 - 6.5 / 8])


@pytest.mark.slow
def test_a_page_has_the_runs_and_links_to_their_perfetto_traces(tmp_path, monkeypatch):
    pytest.importorskip("bokeh")
    monkeypatch.chdir(tmp_path)
    for name in ("one", "other <b>"):
        (tmp_path / name).mkdir()
        timeline = scripted(tmp_path / name, lambda rank, one, step: one.computes(1.0))
    shown = CliRunner().invoke(commands, ["report", "one", "other <b>"])
    assert shown.exit_code == 0, shown.output
    page = (tmp_path / "one/report/report.html").read_text()
    for link in ("perfetto.json", "../../other%20%3Cb%3E/report/perfetto.json"):
        assert f'<a href="{link}">' in page and (tmp_path / "one/report" / unquote(link)).exists()
    assert "<h2>other &lt;b&gt;</h2>" in page and "<script src" not in page
    heading, rows = time_table(shares(timeline), timeline)
    assert page.count("<td>all</td>") == 2 and len(heading) == 1 + len(timeline.traces)
    assert all(f"<th>{name}</th>" in page for name, _ in rows)


def test_bars_of_a_timeline_are_its_newest_records(tmp_path, monkeypatch):
    pytest.importorskip("bokeh")
    from mpitrain.tools.report import page

    timeline = scripted(tmp_path, lambda rank, one, step: one.computes(1.0))
    bars, texts, zero = page.timeline_bars(timeline)
    (columns,) = bars.values()
    computed = [trace.records[trace.records["kind"] == COMPUTE] for trace in timeline.traces]
    assert len(columns["left"]) == sum(map(len, computed)) and texts == ["a layer"]
    np.testing.assert_allclose(
        columns["left"] + zero, np.sort(np.concatenate([records["start"] for records in computed]))
    )
    np.testing.assert_allclose(columns["ms"], 1000.0)
    assert {*columns["awaited"]} == {-1}
    monkeypatch.setattr(page, "MOST_BARS", len(timeline.traces))
    (newest,) = page.timeline_bars(timeline)[0].values()
    assert [*newest["left"]] == [0] * len(timeline.traces)
