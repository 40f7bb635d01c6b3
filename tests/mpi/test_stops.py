"""Runs that are stopped, stand still or are killed before they began, and what a terminal shows of one that goes on."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpitrain.machine.status import FLAG
from tests.mpi.test_commands import PROGRAM, TINY, python_ranks, records
from tests.processes import SECONDS, launch, sets
from tests.terminals import on_a_terminal, rendered

ROOT = Path(__file__).parents[2]
PATIENCE = SECONDS
MAIN = f"from mpitrain.cli import main; main(['train', '--out', 'run', '--set', 'run.stall_seconds=2.0', *{TINY!r}])"
RANK = "import os, signal, time; rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK'])\n"


def test_a_stop_while_the_model_is_built_ends_all_ranks(tmp_path):
    code = (
        f"{RANK}from mpitrain.run import loop\n"
        "def build(transport, *rest, **named):\n"
        "    if rank == 1: transport.barrier()\n"
        "    print('building', flush=True); time.sleep(600)\n"
        f"loop.build = build\n{MAIN.replace('2.0', '600.0')}"
    )
    supervised = (
        "import sys; from mpitrain.cli.launch.supervise import Requests, run\n"
        f"sys.exit(run(['mpirun', '-n', '2', sys.executable, '-X', {FLAG!r}, '-c', {code!r}], {{}}, Requests(), True))"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", supervised],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "building" in job.stdout.readline()
    job.send_signal(signal.SIGTERM)
    out, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 85, out + errors
    assert (out + errors).count("stopped before the run began") == 1, out + errors
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "place, reported",
    [
        (
            f"{RANK}if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n",
            r"Timeout \(0:00:02\)!\n.*in join_world\n",
        ),
        (
            f"{RANK}from mpitrain.run import loop\n"
            "agree_on = loop.agree_on\n"
            "def stopped(*rest):\n"
            "    if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
            "    return agree_on(*rest)\n"
            "loop.agree_on = stopped\n",
            r"rank 0 on \S+: no progress for \d+ s in looking for the run directory",
        ),
    ],
    ids=["before-it-is-connected", "at-a-first-message"],
)
def test_a_rank_that_stands_still_before_the_run_began_ends_the_job(place, reported, tmp_path):
    done = python_ranks(2, place + MAIN, tmp_path)
    assert done.returncode != 0
    assert re.search(reported, done.stderr, re.DOTALL), done.stderr


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_shows_the_bar_and_ctrl_c_is_answered(columns, tmp_path):
    asked = []

    def ask(data, job):
        if (
            not asked
            and b"step 4: validation" in data
            and re.search(rb"\d+/1000000 .*loss \d", data)
        ):
            asked.append(job.send_signal(signal.SIGINT))

    settings = [*TINY, *sets(run__steps=1000000, run__eval_every=4)]
    code, data = on_a_terminal(
        [*PROGRAM, "launch", "-n", "2", "--", "train", "--out", "run", *settings],
        columns,
        seen=ask,
        cwd=tmp_path,
    )
    assert code == 85 and records(tmp_path / "run")[-1]["event"] == "stopped"
    shown = rendered(data, columns)
    begin = shown.index(next(line for line in shown if line.startswith("step 4: ")))
    kinds = (
        r"step \d+: validation loss [\d.]+ nats, [\d.]+ bits per byte, accuracy [\d.]+%(;[a-z ]*\d*)?",
        r"step +\d+/1000000  loss [\d.]+  lr [\d.e-]+  grad norm .*",
        r" [a-z ]*\d+",  # of "; the best was after step 24", in a narrow terminal
        rf" +0%\|.{{,{columns - 6}}}",
        "mpitrain launch: asked to stop; .*",
        "again to end it at once",
        r"stopped at step \d+; --resume goes .*",
        "",
    )
    assert all(any(re.fullmatch(kind, line) for kind in kinds) for line in shown[begin:]), (
        "\n".join(shown)
    )
    assert sum(line.startswith("mpitrain launch: asked") for line in shown) == 1 and shown[
        -2
    ].startswith("stopped at")


@pytest.mark.parametrize(
    "begins, ends, code, reported",
    [
        ("with mpitrain.ranks() as transport", "raise ValueError('planned')", 1, "ValueError"),
        ("with mpitrain.ranks() as transport", "sys.exit(3)", 3, "by sys.exit(3)"),
        ("with mpitrain.ranks() as transport", "sys.exit(0)", 1, "by sys.exit(0)"),
        ("if transport := mpitrain.connect()", "raise ValueError('planned')", 1, "ValueError"),
    ],
)
def test_a_program_ends_when_one_rank_leaves_it(begins, ends, code, reported, tmp_path):
    program = (
        "import numpy, sys, mpitrain\n"
        f"{begins}:\n"
        f"    if transport.rank == 1: {ends}\n"
        "    transport.recv(numpy.zeros(1), (transport.rank + 1) % transport.size)\n"
    )
    done = python_ranks(3, program, tmp_path)
    assert done.returncode == code and reported in done.stderr, done.stderr
    assert ("Traceback" in done.stderr) == ("raise" in ends)


def test_a_late_warning_does_not_kill_a_run_that_has_ended(tmp_path):
    """Python removes its handlers before MPI ends, and USR1 would then end the process."""
    job = subprocess.Popen(
        [*PROGRAM, "train", "--out", "run", *TINY], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert any("bitwise equal" in line for line in job.stdout)
    while job.poll() is None:
        job.send_signal(signal.SIGUSR1)
        time.sleep(0.001)
    assert job.returncode == 0 and records(tmp_path / "run")[-1]["event"] == "end"


def test_a_rank_that_never_connects_is_named_in_the_last_line(tmp_path):
    (tmp_path / "loops.py").write_text("""
import time
from mpitrain.machine import process
while process.launched().rank == 1: time.sleep(1)
""")
    words = ["--set", 'run.plugins=["loops.py"]', *sets(run__stall_seconds=3)]
    done = launch(2, "train", *TINY, *words, cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and f"rank 1 on {socket.gethostname()} " in last, done.stderr
    assert "mpitrain runs report" not in last
