"""Programs in which a rank ends early: a rank that waits for the ended one ends the job, and no other does."""

import pytest

from tests.processes import launch, python_ranks

BEGIN = """
import sys, time
import numpy as np, mpitrain
from mpitrain.transport import failures
failures.PATIENCE = 0.75
transport, one = mpitrain.connect(), np.zeros(1)
"""
"""Messages need far less than PATIENCE here."""
CAUGHT = """
try: transport.rank != 1 or 1 / 0
except ZeroDivisionError: sys.exit()
transport.recv(one, 1)
"""
WAITS = {
    "caught": CAUGHT,
    "split": "transport.rank == 1 or transport.split(0)",
    "any": "transport.MPI.Finalize() if transport.rank else transport.start_recv(one, None).wait()",
}
"""Calls of three ranks, of which rank 1 ends."""
EARLY = """
rest = transport.split(int(transport.rank == 2))
if transport.rank == 2:
    transport.send(one + 5, 0)
    sys.exit()
if transport.rank == 0: transport.start_recv(one, None).wait(); assert one[0] == 5
if transport.rank == 1: time.sleep(3 * failures.PATIENCE)
rest.barrier()
rest.exchange(one, 1 - rest.rank, np.zeros(1), 1 - rest.rank)
"""


@pytest.mark.parametrize("call", WAITS)
def test_a_rank_that_waits_for_an_ended_rank_ends_the_job(call, tmp_path):
    done = python_ranks(3, BEGIN + WAITS[call], tmp_path)
    assert done.returncode == 1 and "PeerLost" in done.stderr, done.stderr


def test_ranks_that_need_no_ended_rank_go_on(tmp_path):
    done = python_ranks(3, BEGIN + EARLY, tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr


FAILS = {"sys.exit(3)": 3, "raise ValueError": 1}
"""Ends of rank 1, and the exit code of the job."""


@pytest.mark.parametrize("end", FAILS)
def test_a_failed_rank_of_launch_ends_ranks_that_compute(end, tmp_path):
    """No rank waits for it, so no rank would notice its departure."""
    late = 'time.sleep(20); print("late")'
    code = f"{BEGIN}\nif transport.rank == 1: {end}\n{late}\n"
    done = launch(2, "python", "-c", code, cwd=tmp_path)
    assert done.returncode == FAILS[end] and "late" not in done.stdout, done.stderr
    assert "PeerLost" not in done.stderr
