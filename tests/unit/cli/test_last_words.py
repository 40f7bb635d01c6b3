"""A stop that comes from Open MPI's mpirun itself, which forwards no output meanwhile: what is heard, awaited and said then."""

import signal
import subprocess
import sys
import threading

import pytest

from mpitrain.cli.terminal import stop_requests
from mpitrain.cli.terminal.stop_requests import Stop
from tests.mpi.test_commands import TINY
from tests.processes import SECONDS

# A program that is named as Open MPI's launcher, and ends its rank with CONT and TERM without forwarding what the rank prints.
MPIRUN = """
import os, pathlib, signal, subprocess, sys, time
pathlib.Path("/proc/self/comm").write_text("prterun")
with open("forwarded", "wb") as forwarded:
    rank = subprocess.Popen([sys.executable, "-m", "mpitrain", *{words!r}], stdout=forwarded)
while b"step  " not in pathlib.Path("forwarded").read_bytes() and rank.poll() is None:
    time.sleep(0.02)
for number in (signal.SIGCONT, signal.SIGTERM):
    rank.send_signal(number)
    time.sleep(0.1)
sys.exit(rank.wait())
"""


@pytest.mark.slow
def test_a_rank_that_mpirun_ends_says_so_and_warned_before(tmp_path):
    keys = "--set", "run.steps=1000000", "--set", "run.log_every=1"
    words = ["train", "--out", "run", *TINY, *keys]
    done = subprocess.run(
        [sys.executable, "-c", MPIRUN.format(words=words)],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=SECONDS,
    )
    forwarded = (tmp_path / "forwarded").read_text()
    (step,) = (path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert done.returncode == 85, done.stderr
    last = int(step.removeprefix("step-"))
    assert done.stdout == f"stopped at step {last}; --resume goes on from there\n"
    assert forwarded.startswith(stop_requests.ADVICE + "\n") and "stopped at step" not in forwarded


@pytest.fixture
def stop():
    """As it is once the ranks are connected; the signals of this process are as before afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCONT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield Stop()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_after_a_cont_a_rank_waits_briefly_for_a_term(stop, monkeypatch):
    assert not stop.asked()
    stop._announce(signal.SIGCONT, None)
    assert not stop.asked()
    monkeypatch.setattr(stop_requests, "ANNOUNCED", SECONDS)  # of a busy machine
    stop._announce(signal.SIGCONT, None)
    threading.Timer(0.05, stop._note, (signal.SIGTERM, None)).start()
    assert stop.asked()


def test_after_the_end_of_a_run_no_signal_ends_its_process(stop, monkeypatch):
    killed = []
    monkeypatch.setattr(stop_requests.os, "kill", lambda *call: killed.append(call))
    stop.note()
    for over in (False, True):
        if over:
            stop.ended()
        for _ in range(2):
            stop._note(signal.SIGINT, None)
        assert len(killed) == 1 and stop.requested, "only before the end"
        stop.requested = False
    stop.over()
    assert {signal.getsignal(number) for number in stop_requests.STOPS} == {signal.SIG_IGN}


def test_without_mpirun_the_last_line_is_printed(capsys):
    stop_requests.say_last("stopped at step 3")
    assert capsys.readouterr().out == "stopped at step 3\n"
