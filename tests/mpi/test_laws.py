"""The laws of transports and collectives over mpirun."""

import time

import numpy as np
import pytest

from mpitrain.collectives.group import bind
from mpitrain.transport import native
from tests.laws.collectives import CollectiveLaws
from tests.laws.exchange import ExchangeLaws
from tests.laws.lossy import LossyLaws
from tests.laws.moving import MovingLaws
from tests.laws.traffic import TrafficLaws
from tests.laws.transport import TransportLaws, laws_of, share_of_a_core

LAW_CLASSES = (TransportLaws, CollectiveLaws, TrafficLaws, LossyLaws, MovingLaws, ExchangeLaws)
OWN = (TransportLaws, ExchangeLaws)
"""Laws of this transport itself, on every number of ranks: that of the others matters as on threads (ranks/test_laws.py)."""
LAWS = [
    (cls, name, ranks)
    for cls in LAW_CLASSES
    for name in laws_of(cls)
    for ranks in ((1, 2, 3, 4) if cls in OWN else (3,))
]


@pytest.mark.parametrize("mpi_ranks", [3])
def test_a_message_above_64_mib_is_reduced_exactly(mpi_ranks, transport):
    for algorithm in ("ring", "halving-doubling"):
        position = np.arange(17_000_003) % (1 << 20)  # 68 MB; sums stay below 2^24, hence exact
        array = (position + transport.rank).astype("float32")
        bind(transport, array, algorithm=algorithm).run()
        assert np.array_equal(array, 3 * position + 3), algorithm


@pytest.mark.parametrize("mpi_ranks", [3])
def test_native_reduces_an_array_of_many_parts_at_once_or_begun(mpi_ranks, transport, monkeypatch):
    monkeypatch.setattr(native, "PART", 100)
    for count in (0, 100, 701):
        array = np.arange(count) + transport.rank
        reduction = bind(transport, array, algorithm="native")
        reduction.run()
        assert np.array_equal(array, 3 * np.arange(count) + 3)
        reduction.start()
        while not reduction.poll():
            pass
        assert np.array_equal(array, 9 * np.arange(count) + 9)


@pytest.mark.parametrize("mpi_ranks", [2])
def test_an_idle_rank_uses_less_than_a_tenth_of_a_core(mpi_ranks, transport):
    assert share_of_a_core(transport, 2.0, time.process_time) < 0.1


@pytest.mark.parametrize(
    ("cls", "name", "mpi_ranks"), LAWS, ids=lambda value: getattr(value, "__name__", None)
)
def test_mpi_obeys(cls, name, mpi_ranks, transport):
    assert transport.size == mpi_ranks
    getattr(cls(), name)(transport)
