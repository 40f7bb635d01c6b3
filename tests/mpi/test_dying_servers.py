"""A parameter server that has nothing to do, then is killed or stands still: what it costs, and what is said."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.mpi.test_commands import TINY, ranks_below
from tests.processes import PROGRAM, SECONDS, sets

SERVER = 2
WATCHED = 2.0  # seconds


def cpu_s(pid):
    """Seconds of a core that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rank_of(pid):
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(
        next(
            word.partition(b"=")[2]
            for word in words
            if word.startswith((b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK="))
        )
    )


@pytest.mark.parametrize(
    "ending, stall, said",
    [
        (signal.SIGKILL, "600", rf"mpitrain launch: rank {SERVER} on \S+ was killed: signal 9"),
        (
            signal.SIGSTOP,
            "8.0",  # In this time the ranks have to connect, too, on a machine with other work.
            rf"rank {SERVER} on \S+: the run stands still .*rank {SERVER} on \S+ is stopped by a signal",
        ),
    ],
    ids=["killed", "stands-still"],
)
def test_an_idle_server_sleeps_and_a_dead_one_is_named(ending, stall, said, tmp_path):
    run = subprocess.Popen(
        [
            *PROGRAM,
            "launch",
            "-n",
            str(SERVER + 1),
            "--",
            "train",
            "--out",
            "run",
            *TINY,
            *sets(
                replication__mode="server",
                replication__update="async",
                run__delay="random:200:1",
                run__steps=100000,
                run__log_every=1,
                run__stall_seconds=stall,
            ),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    heard = next(
        (line for line in run.stdout if re.match(r"step +1/", line)), "it has begun no step"
    )
    (server,) = (pid for pid in ranks_below(run.pid) if rank_of(pid) == SERVER)
    began, used = time.monotonic(), cpu_s(server)
    time.sleep(WATCHED)
    assert cpu_s(server) - used < 0.1 * (time.monotonic() - began), heard
    os.kill(server, ending)
    rest, _ = run.communicate(timeout=SECONDS)
    assert run.returncode not in (0, 2, 85) and re.search(said, rest), rest
