"""The places of a job that may lose ranks: who has which, and which ranks wait as spares without one.

A *place* is a rank of the layout; its *number* is the rank in the whole job at the start, which a process keeps.
Spares wait outside of every group. After a loss they take the places of lost ranks, so that the layout stays:

    place             0   1   2   3    wait
    number at start   0   1   2   3    4, 5
    2 is lost         0   1   4   3    5
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """The number of the rank at a place, and the replica to which the place belongs: it needs all of its places."""

    number: int
    replica: int


def refilled(places: Sequence[Place], hosts: Mapping[int, str], living: set[int]) -> list[Place]:
    """Return the places after a loss, each with a living rank; empty if no replica can be made whole.

    Replicas that miss the fewest ranks are made whole first. One that cannot be is given up, and its living
    ranks are spares from then on. A lost rank's own host is preferred, then the host with most spares.

    places  before the loss
    hosts   {number: host}, of lost ranks, too
    living  numbers
    """
    free = sorted(living - {place.number for place in places})
    missing = Counter(place.replica for place in places if place.number not in living)
    damaged = sorted(missing, key=lambda replica: (missing[replica], replica))
    given_up = set[int]()
    while missing.total() > len(free):
        last = damaged.pop()
        del missing[last]
        given_up.add(last)
        free += [p.number for p in places if p.replica == last and p.number in living]
    result = []
    for number, replica in places:
        if replica in given_up:
            continue
        if number not in living:
            many = Counter(hosts[one] for one in free)
            number = min(
                free, key=lambda one: (hosts[one] != hosts[number], -many[hosts[one]], one)
            )
            free.remove(number)
        result.append(Place(number, replica))
    return result
