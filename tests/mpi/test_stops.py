"""Runs that are stopped, stand still or are killed before they began, and what a terminal shows of one that goes on."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mpi.test_commands import PROGRAM, TINY, python_ranks, records
from tests.processes import SECONDS

ROOT = Path(__file__).parents[2]
PATIENCE = SECONDS
MAIN = f"from mpitrain.cli import main; main(['train', '--out', 'run', '--set', 'run.stall_seconds=2.0', *{TINY!r}])"
RANK = "import os, signal, time; rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK'])\n"


def test_a_stop_while_the_model_is_built_ends_ranks_at_work_and_ranks_that_wait(tmp_path):
    code = (f"{RANK}from mpitrain.run import loop\n"
            "def build(transport, *rest, **named):\n"
            "    if rank == 1: transport.barrier()\n"
            "    print('building', flush=True); time.sleep(600)\n"
            f"loop.build = build\n{MAIN.replace('2.0', '600.0')}")
    supervised = ("import sys; from mpitrain.cli.supervise import Requests, run\n"
                  f"sys.exit(run(['mpirun', '-n', '2', sys.executable, '-c', {code!r}], {{}}, Requests(), True))")
    job = subprocess.Popen([sys.executable, "-c", supervised], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "building" in job.stdout.readline()
    job.send_signal(signal.SIGTERM)
    out, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 85, out + errors
    assert (out + errors).count("stopped before the run began") == 1, out + errors
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place, reported", [
    (f"{RANK}if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n", r"Timeout \(0:00:02\)!\n.*in connect\n"),
    (f"{RANK}from mpitrain.run import loop\n"
     "find = loop.find\n"
     "def stopped(*rest):\n"
     "    if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
     "    return find(*rest)\n"
     "loop.find = stopped\n", r"rank 0 on \S+: no progress for \d+ s in looking for the run directory"),
], ids=["before-it-is-connected", "at-a-first-message"])
def test_a_rank_that_stands_still_before_the_run_began_ends_the_job(place, reported, tmp_path):
    done = python_ranks(2, place + MAIN, tmp_path)
    assert done.returncode != 0
    assert re.search(reported, done.stderr, re.DOTALL), done.stderr


def test_a_terminal_shows_the_bar_while_the_run_goes_on_and_ctrl_c_is_answered(tmp_path):
    master, slave = pty.openpty()
    run = subprocess.Popen([*PROGRAM, "launch", "-n", "2", "--", "train", "--out", "run", *TINY, "--set", "run.steps=1000000"],
                           cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    shown_until(master, r"\d+/1000000 .*loss \d")
    run.send_signal(signal.SIGINT)
    shown_until(master, "mpitrain launch: asked to stop; the run ends after a step and a checkpoint")
    shown_until(master, "stopped at step")
    while run.poll() is None:    # a terminal that nobody reads stops who writes
        read_some(master)
    os.close(master)
    assert run.returncode == 85 and records(tmp_path / "run")[-1]["event"] == "stopped"


def shown_until(terminal, pattern):
    """What a terminal shows until it has shown the pattern."""
    shown, deadline = "", time.monotonic() + PATIENCE
    while not re.search(pattern, shown):
        assert time.monotonic() < deadline, shown
        shown += read_some(terminal)
    return shown


def read_some(terminal):
    try:
        return os.read(terminal, 1 << 16).decode(errors="replace") if select.select([terminal], [], [], 0.1)[0] else ""
    except OSError:    # the other end is closed
        return ""
