"""Judgements of a stall: one rank prints, a moving job is judged again, a warning counts once."""

import re
import sys
import time

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.cli.launch.failed import Failure
from mpitrain.errors import ConfigError
from mpitrain.machine.process import own_id, process_state
from mpitrain.run import watchdog
from mpitrain.run.observation import ANSWER, ASK, Answering, ask
from mpitrain.run.watchdog import StallReport
from mpitrain.tools.report.text import what_happens_now
from mpitrain.trace.recorder import Recorder
from mpitrain.trace.timeline import trace_file
from tests.processes import SECONDS, run

STALL = 5.0


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Returns a function: ages in seconds of the last sign of each rank -> reports of the ranks."""
    monkeypatch.setattr(watchdog, "ANSWERED", 0.1)  # The invented ranks do not answer.

    def made(*ages, on_stall="end", skew=0.0):
        (tmp_path / "trace").mkdir()
        reports = []
        for rank, age in enumerate(ages):
            behind = [age]
            recorder = Recorder(clock=lambda behind=behind: time.perf_counter() - behind[0])
            recorder.facts(rank=rank, ranks=len(ages), host="node", process_id=own_id())
            recorder.facts(time=time.time() + skew, clock_then=time.perf_counter())
            recorder.step = 1
            if rank == 0:
                recorder.wait(recorder.name("a barrier", range(len(ages))))
            else:
                recorder.compute(recorder.name("a layer"))
            recorder.keep(trace_file(tmp_path, rank))
            behind[0] = 0.0
            answering = Answering(tmp_path, rank, recorder)
            reports.append(StallReport(tmp_path, STALL, on_stall, answering))
        return reports

    return made


def test_one_rank_prints_the_report_and_the_others_end(job, capfd):
    reports = job(6.0, 6.5)
    verdicts = [report.verdict(time.time() - STALL) for report in reports]
    assert [verdict.verdict for verdict in verdicts] == ["ends", "ends"]
    errors = capfd.readouterr().err
    assert errors.count(": the run stands still") == 1 and "rank 1" in errors


@pytest.mark.parametrize("skew", [-1000.0, 1000.0])
def test_a_wrong_clock_of_a_host_changes_no_finding(skew, job, capfd):
    assert job(6.0, 6.5, skew=skew)[0].verdict(time.time() - STALL).verdict == "ends"
    (seconds,) = re.findall(r"rank 1 on node has not moved for (\d+) s", capfd.readouterr().err)
    assert 6 <= int(seconds) < SECONDS


def test_a_job_that_moves_is_judged_again_when_its_rank_may_stall(job, capfd):
    verdict = job(6.0, 3.0)[0].verdict(time.time() - STALL)
    assert verdict.verdict == "moving" and 0 < verdict.seconds <= STALL - 3.0
    assert not capfd.readouterr().err


def test_a_warning_counts_for_its_stall_only(job, capfd):
    first, second = job(6.0, 6.5, on_stall="warn")
    began = time.time()
    assert first.verdict(began).verdict == "warned"
    assert second.verdict(began).verdict == "warned"
    assert capfd.readouterr().err.count(": the run stands still") == 1
    assert second.verdict(time.time() + 1).verdict == "warned"  # of a later stall
    assert capfd.readouterr().err.count(": the run stands still") == 1


def test_a_rank_that_never_judges_leaves_no_verdict(job, tmp_path):
    (report,) = job(6.0)
    (tmp_path / "trace" / "stall-1").touch()
    assert report.verdict(time.time()) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"number": 1}', '{"number": "x" }'])
def test_a_damaged_question_gets_no_answer(text, tmp_path):
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / ASK).write_text(text)
    Answering(tmp_path, 0, Recorder()).look()
    assert [path.name for path in (tmp_path / "trace").iterdir()] == [ASK]


def test_nothing_is_written_through_links_at_the_names_of_questions_and_answers(tmp_path):
    (tmp_path / "trace").mkdir()
    (tmp_path / "victim").write_text("mine")
    answering = Answering(tmp_path, 0, Recorder())
    (tmp_path / "trace" / ASK).symlink_to(tmp_path / "victim")
    (tmp_path / "trace" / ANSWER.format(0)).symlink_to(tmp_path / "victim")
    found = ask(tmp_path, [0], {0: own_id()}, True, STALL, answering.look)
    assert (tmp_path / "victim").read_text() == "mine"
    assert found[0].processes == {"0": "running"}


def test_a_question_is_answered_once_and_a_stopped_rank_is_not_awaited(tmp_path):
    (tmp_path / "trace").mkdir()
    answering = Answering(tmp_path, 0, Recorder())
    gone = own_id()._replace(started=1)
    began = time.monotonic()
    found = ask(tmp_path, [0, 1], {0: own_id(), 1: gone}, False, 60.0, answering.look)
    assert time.monotonic() - began < 30 and list(found) == [0]
    assert not found[0].stacks and found[0].processes == {"0": "running", "1": "gone"}


def test_the_state_of_a_process_of_another_host_or_container_is_unknown():
    assert process_state(own_id()) == "running"
    assert process_state(own_id()._replace(number=2**22 + 1)) == "gone"
    assert process_state(own_id()._replace(host="elsewhere")) == ""
    assert process_state(own_id()._replace(namespace="pid:[1]")) == ""


@pytest.mark.slow
def test_usr2_prints_the_stacks_of_a_process_that_goes_on():
    code = (
        "import os, signal; from mpitrain.cli.terminal.stop_requests import Stop\n"
        "def here(): os.kill(os.getpid(), signal.SIGUSR2)\n"
        "Stop(); here(); print('on')"
    )
    done = run([sys.executable, "-c", code])
    assert (done.returncode, done.stdout) == (0, "on\n")
    assert "in here" in done.stderr


@pytest.mark.parametrize("on_stall", ["end", "warn"])
def test_launch_takes_a_report_as_the_failure_of_a_job_that_it_ends(on_stall, job, capfd):
    job(6.0, 6.5, on_stall=on_stall)[0].verdict(time.time() - STALL)
    failure = Failure()
    failure.read(capfd.readouterr().err.encode())
    assert (": the run stands" in failure.report) == (on_stall == "end")


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_run_without_a_living_process_is_called_dead(is_dead, job, tmp_path, monkeypatch):
    monkeypatch.setattr("mpitrain.tools.report.text.SECONDS", 0.1)
    if is_dead:
        monkeypatch.setattr("mpitrain.run.observation.process_state", lambda process: "gone")
    job(6.0, 6.5)
    (tmp_path / "metrics.jsonl").write_text("")
    lines = list(what_happens_now(tmp_path, False))
    assert (lines[0] == "No process of this run is left: it was killed, or it crashed.") == is_dead
    assert lines[is_dead].startswith("rank 1 on node has not moved for ")


def test_a_run_whose_traces_are_all_damaged_is_refused(job, tmp_path):
    reports = job(6.0, 6.5)
    for rank in range(2):
        trace_file(tmp_path, rank).write_text("damaged")
    with pytest.raises(ConfigError, match="rank-00000"):
        list(what_happens_now(tmp_path, False))
    with pytest.raises(ConfigError):  # Each rank then reports its own position.
        reports[0].verdict(time.time() - STALL)


@pytest.mark.parametrize("words", [["--stacks"], ["--now"], ["--now", "--stacks"]])
def test_only_a_living_run_with_traces_can_be_asked(words, tmp_path):
    (tmp_path / "trace").mkdir()
    for metrics in ("", '{"event": "end", "step": 3}\n'):
        (tmp_path / "metrics.jsonl").write_text(metrics)
        done = CliRunner().invoke(commands, ["report", str(tmp_path), *words])
        assert isinstance(done.exception, ConfigError) and done.exception.exit_code == 2
