"""The laws of messages in GPU memory over mpirun: MPI itself follows the pointers that a fake GPU hands out."""

import sys

import pytest

from mpitrain.transport.mpi import connect
from tests.fakes import cupy
from tests.laws.device import CARRIERS, DeviceLaws, cuda_backend
from tests.laws.transport import laws_of
from tests.processes import SECONDS


@pytest.mark.mpi(ranks=[2, 3], timeout=SECONDS)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_mpi_obeys(carrier, mpi_ranks, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    transport = connect()
    for name in laws_of(DeviceLaws):
        try:
            getattr(DeviceLaws(), name)(transport, carrier, cuda_backend())
        except BaseException as error:
            error.add_note(f"law: {name}")
            raise
