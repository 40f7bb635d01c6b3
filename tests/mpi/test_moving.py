"""A training run over MPI whose reductions a thread moves."""

import numpy as np
import pytest

from mpitrain.collectives.moving import ByCaller, ByThread, mover
from mpitrain.transport.mpi import connect
from tests.ranks.test_training import TINY, configured, curve


@pytest.mark.parametrize("mpi_ranks", [2, 3])
def test_between_hosts_a_thread_leaves_every_bit_as_it_is(mpi_ranks):
    transport = connect()
    assert transport.admits_threads
    assert type(mover(transport, [])) is ByCaller
    transport.hosts = tuple(f"host{rank}" for rank in range(mpi_ranks))  # pretended
    assert type(mover(transport, [])) is ByThread
    without, beside = (curve(transport, configured(*TINY, f"replication.progress_thread={thread}")) for thread in ("no", "auto"))
    assert all(np.array_equal(one, other) for one, other in zip(without, beside, strict=True))
