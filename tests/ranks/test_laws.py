"""The laws of transports and collectives on threads: every number of ranks from 1 to 8."""

import pytest

from mpitrain.transport.threads import run_ranks
from tests.laws.collectives import CollectiveLaws
from tests.laws.transport import TransportLaws, laws_of

LAWS = [(cls, name) for cls in (TransportLaws, CollectiveLaws) for name in laws_of(cls)]


@pytest.mark.parametrize(("cls", "name"), LAWS, ids=[name for _, name in LAWS])
def test_threads_obey(cls, name):
    for n in range(1, 9):
        run_ranks(n, getattr(cls(), name))
