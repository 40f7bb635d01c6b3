"""Shared windows over MPI where there is no room for them."""

import numpy as np
import pytest

from mpitrain.collectives.bind import bind
from mpitrain.machine import process
from mpitrain.transport import mpi
from tests.laws.transport import coded


@pytest.mark.parametrize("mpi_ranks", [2])
def test_without_room_memory_is_plain_and_one_line_says_so(mpi_ranks, monkeypatch, capfd):
    transport = mpi.connect()
    monkeypatch.setattr(process, "shared_memory", lambda: 1000)
    array = transport.allocate(1001, "float64")
    assert transport.windows.locate(array, transport.rank) is None
    said = capfd.readouterr().err
    if transport.rank == 0:
        assert said.count("\n") == 1
        assert "has 0 MiB left" in said
        assert "using plain memory" in said
    else:
        assert said == ""
    array[:] = coded(transport.rank, 1001)
    reduction = bind(transport, array, algorithm="shared")
    reduction.run()
    assert reduction.algorithm == "ring"
    assert np.array_equal(array, coded(0, 1001) + coded(1, 1001))
