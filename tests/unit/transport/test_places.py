"""Who has which place after a loss."""

import pytest

from mpitrain.transport.places import Place, refilled

EACH, PAIRS = [0, 1, 2, 3], [0, 0, 1, 1]
ONE_HOST = "aaaaaaa"


@pytest.mark.parametrize(
    ("replicas", "hosts", "lost", "numbers"),
    [
        (EACH, ONE_HOST, {5}, [0, 1, 2, 3]),
        (EACH, ONE_HOST, {2}, [0, 1, 4, 3]),
        (EACH, ONE_HOST, {0, 2}, [4, 1, 5, 3]),
        (EACH, ONE_HOST, {0, 2, 3, 6}, [4, 1, 5]),
        (EACH, "abababb", {0, 3, 6}, [4, 1, 2, 5]),
        (EACH, "aaaabcc", {1}, [0, 5, 2, 3]),
        (PAIRS, ONE_HOST, {1}, [0, 4, 2, 3]),
        (PAIRS, ONE_HOST, {0, 2, 3, 4, 5}, [6, 1]),
        (PAIRS, ONE_HOST, {1, 4, 5, 6}, [2, 3]),
        (PAIRS, ONE_HOST, {0, 3, 4, 5, 6}, [2, 1]),
        (PAIRS, ONE_HOST, {0, 1, 3, 4, 5, 6}, []),
    ],
)
def test_spares_keep_as_many_replicas_whole_as_they_can(replicas, hosts, lost, numbers):
    """Ranks 0 to 3 have places, 4 to 6 wait; the last rows have no spare, but living ranks of a lost replica."""
    places = [Place(number, replica) for number, replica in enumerate(replicas)]
    found = refilled(places, dict(enumerate(hosts)), {*range(7)} - lost)
    assert [place.number for place in found] == numbers
    kept = [place.replica for place in found]
    assert kept == sorted(kept) and all(kept.count(one) == replicas.count(one) for one in kept)
