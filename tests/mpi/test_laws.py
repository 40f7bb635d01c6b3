"""The laws of transports and collectives over mpirun: one start per number of ranks runs them all."""

import numpy as np
import pytest

from mpitrain.collectives.bind import bind
from mpitrain.transport import mpi
from mpitrain.transport.mpi import connect
from tests.laws.collectives import CollectiveLaws
from tests.laws.lossy import LossyLaws
from tests.laws.moving import MovingLaws
from tests.laws.traffic import TrafficLaws
from tests.laws.transport import TransportLaws, laws_of
from tests.processes import SECONDS


@pytest.mark.mpi(ranks=[3], timeout=SECONDS)
def test_a_message_above_64_mib_is_reduced_exactly(mpi_ranks):
    transport = connect()
    for algorithm in ("ring", "halving-doubling"):
        position = np.arange(17_000_003) % (1 << 20)  # 68 MB; sums stay below 2^24, hence exact
        array = (position + transport.rank).astype("float32")
        bind(transport, array, algorithm=algorithm).run()
        assert np.array_equal(array, 3 * position + 3), algorithm


@pytest.mark.mpi(ranks=[3], timeout=SECONDS)
def test_native_reduces_an_array_of_many_parts_at_once_or_begun(mpi_ranks, monkeypatch):
    monkeypatch.setattr(mpi, "PART", 100)
    transport = connect()
    for count in (0, 100, 701):
        array = np.arange(count) + transport.rank
        reduction = bind(transport, array, algorithm="native")
        reduction.run()
        assert np.array_equal(array, 3 * np.arange(count) + 3)
        reduction.start()
        while not reduction.poll():
            pass
        assert np.array_equal(array, 9 * np.arange(count) + 9)


@pytest.mark.mpi(ranks=[1, 2, 3, 4, 5], timeout=SECONDS)
@pytest.mark.parametrize("cls", [TransportLaws, CollectiveLaws, TrafficLaws, LossyLaws, MovingLaws])
def test_mpi_obeys(cls, mpi_ranks):
    transport = connect()
    assert transport.size == mpi_ranks
    for name in laws_of(cls):
        try:
            getattr(cls(), name)(transport)
        except BaseException as error:
            error.add_note(f"law: {name}")
            raise
