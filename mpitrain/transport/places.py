"""The places of a job that may lose ranks: who has which, and which ranks wait as spares without one.

A *place* is a rank of the layout; its *number* is the rank in the whole job at the start, which a process keeps.
Spares wait outside of every group. After a loss they take the places of lost ranks, so that the layout stays:

    place             0   1   2   3    wait
    number at start   0   1   2   3    4, 5
    2 is lost         0   1   4   3    5
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
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


class Change(NamedTuple):
    """What a loss has changed.

    lost      number of the places whose ranks are dead
    left      number of living ranks that had a place and have none now
    replaced  pairs of a rank and the number of the process that has taken its place
    """

    lost: int
    left: int
    replaced: list[tuple[int, int]]

    def said(self, before: int, size: int, spares: int | None) -> str:
        """Return the line for users; spares: how many are left, None: there were none at the start."""
        words = [f"{self.lost} of {before} ranks are lost"]
        words += [f"{self.left} leave with their replica"] * bool(self.left)
        if self.replaced:
            named = ", ".join(str(rank) for rank, _ in self.replaced)
            words.append(f"spares take the place of rank {named}, and {spares or 0} wait")
        elif spares is not None:
            words.append("no spare is left")
        return "; ".join([*words, f"{size} go on"])


def change(before: Sequence[Place], places: Sequence[Place], living: Container[int]) -> Change:
    """Return what has changed; the places are those of `refilled`."""
    kept = {place.replica for place in places}
    had = [place.number for place in before if place.replica in kept]
    replaced = [
        (rank, place.number)
        for rank, (number, place) in enumerate(zip(had, places, strict=True))
        if number != place.number
    ]
    lost = [place for place in before if place.number not in living]
    left = {one.number for one in (*before, *places)}
    return Change(len(lost), len(left) - len(lost) - len(places), replaced)
