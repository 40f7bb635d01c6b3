"""A training run over MPI whose reductions a thread moves."""

import numpy as np
import pytest

from mpitrain.collectives.engine.executor import ProgressEngine, ProgressThread, mover
from mpitrain.transport.mpi import connect
from tests.training import STEPS, TINY, configured, curve


@pytest.mark.parametrize(
    "mpi_ranks, settings", [(2, ["layout.tp=2"]), (3, [])], ids=["activations", "gradients"]
)
def test_between_hosts_a_thread_leaves_every_bit_as_it_is(mpi_ranks, settings, monkeypatch):
    from mpi4py import MPI  # begins MPI, which is not for the process that only starts the ranks

    transport, begun, begin = connect(), [], ProgressThread._begin
    assert transport.admits_threads
    assert type(mover(transport, [])) is ProgressEngine
    monkeypatch.setattr(
        MPI, "Get_processor_name", lambda: f"host{MPI.COMM_WORLD.rank}"
    )  # of transports split off from now on
    monkeypatch.setattr(
        ProgressThread, "_begin", lambda self: (begun.append(self._transport.size), begin(self))
    )
    without = curve(transport, configured(*TINY, *settings, "replication.progress_thread=no"))
    assert begun == []
    beside = curve(transport, configured(*TINY, *settings))
    assert all(np.array_equal(one, other) for one, other in zip(without, beside, strict=True))
    assert len(begun) >= STEPS and {*begun} == {mpi_ranks}
