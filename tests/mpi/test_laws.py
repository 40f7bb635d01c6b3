"""The laws of transports and collectives over mpirun: one start per number of ranks runs them all."""

import pytest

from mpitrain.transport.mpi import connect
from tests.laws.collectives import CollectiveLaws
from tests.laws.transport import TransportLaws, laws_of


@pytest.mark.mpi(ranks=[1, 2, 3, 4], timeout=100)
@pytest.mark.parametrize("cls", [TransportLaws, CollectiveLaws])
def test_mpi_obeys(cls, mpi_ranks):
    transport = connect()
    assert transport.size == mpi_ranks
    for name in laws_of(cls):
        try:
            getattr(cls(), name)(transport)
        except BaseException as error:
            error.add_note(f"law: {name}")
            raise
