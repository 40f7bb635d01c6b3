"""The names of ranks in errors of a communicator that was split."""

import sys

import pytest

from tests.processes import run

CODE = """
import numpy as np
from mpitrain.errors import CommError
from mpi4py import MPI
from mpitrain.transport.failures import MpiJob
from mpitrain.transport.mpi import MpiTransport

one = MpiTransport(MPI.COMM_SELF.Dup(), 3, MpiJob(MPI))
send = one.start_send(np.ones(4), 0)
try:
    one.recv(np.ones(2), 0)
except CommError as error:
    print(error)
one.abort("it leaves")
"""


@pytest.mark.slow
def test_an_error_names_its_rank_in_the_whole_job():
    done = run([sys.executable, "-c", CODE])
    assert "0 (of all ranks 3):" in done.stdout, done.stdout + done.stderr
    assert "rank 3: it leaves\n" in done.stderr
