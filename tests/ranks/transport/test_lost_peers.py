"""A rank that ends while another one needs it: the other raises PeerLost, whatever call it is in."""

import numpy as np
import pytest

from mpitrain.errors import CommError, PeerLost
from mpitrain.transport.threads import Gone, run_ranks
from tests.laws.lost_peers import CALLS, OUTLIVED, OUTLIVING, SPARES, begin, outlive


class Dies(Exception):
    """Stands for the end of a rank."""


@pytest.mark.product
@pytest.mark.parametrize("does_raise", [True, False], ids=["raises", "returns"])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_raises_when_its_peer_has_died(name, does_raise):
    found = []

    def rank(transport):
        rest = begin(CALLS[name], transport, 1)
        if transport.rank == 1:
            if does_raise:
                raise Dies
            return
        with pytest.raises(PeerLost) as raised:
            rest()
        found.append(raised.value.ranks)

    if does_raise:
        with pytest.raises(Dies):
            run_ranks(2, rank)
    else:
        run_ranks(2, rank)
    assert found == [(1,)]


def test_a_rank_that_waits_for_a_survivor_loses_its_peer_too():
    found = []

    def rank(transport):
        if transport.rank == 2:
            raise Dies
        with pytest.raises(PeerLost) as raised:
            transport.recv(np.zeros(1), transport.rank + 1)
        found.append(raised.value.ranks)

    with pytest.raises(Dies):
        run_ranks(3, rank)
    assert found == [(2,), (2,)]


def test_a_deadlock_of_living_ranks_is_no_loss():
    with pytest.raises(CommError) as raised:
        run_ranks(2, lambda transport: transport.recv(np.zeros(1), 1 - transport.rank))
    assert not isinstance(raised.value, PeerLost)


def test_the_living_ranks_go_on_after_each_loss_with_spares_in_the_places_of_lost_ranks():
    def die():
        raise Gone

    seen = run_ranks(OUTLIVING, outlive, die, outlives=True, spares=SPARES)
    assert {rank: rows for rank, rows in enumerate(seen) if rows} == OUTLIVED
