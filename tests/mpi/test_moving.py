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
    transport, begun, begin = connect(), [], ProgressThread._begin
    assert transport.admits_threads
    assert type(mover(transport, [])) is ProgressEngine
    monkeypatch.setattr(transport, "hosts", tuple(f"host{rank}" for rank in range(transport.size)))
    monkeypatch.setattr(
        ProgressThread, "_begin", lambda self: (begun.append(self._transport.size), begin(self))
    )
    without = curve(transport, configured(*TINY, *settings, "replication.progress_thread=no"))
    assert begun == []
    beside = curve(transport, configured(*TINY, *settings))
    assert all(np.array_equal(one, other) for one, other in zip(without, beside, strict=True))
    assert len(begun) >= STEPS and {*begun} == {mpi_ranks}
