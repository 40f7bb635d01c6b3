"""The places of a job that may lose ranks: who has which, and which ranks wait as spares without one.

A *place* is a rank of the layout; its *number* is the rank in the whole job at the start, which a process keeps.
Spares wait outside of every group. After a loss they take the places of lost ranks, so that the layout stays:

    place             0   1   2   3    wait
    number at start   0   1   2   3    4, 5
    2 is lost         0   1   4   3    5
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from mpitrain.errors import PeerLost

SPARE_PAUSE = 0.02
"""The pause between two looks of a rank that waits for a place, in seconds."""

DISMISSAL = 77
"""The tag of the message that ends a rank without a place."""


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


class PlacedRanks(Protocol):
    """What a root transport knows of places, and how it goes on after the loss of a rank.

    A transport over MPI or threads inherits it. `_connect_living` and `_settle` are their own.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    number: int
    """This rank's rank in the whole job at the start, which it keeps."""
    history: Sequence[list[Place]] = ([],)
    """The places at the start, and after each loss."""
    living: Mapping[int, str] = {}
    """{number: host} of the ranks that lived after the last loss, with or without a place."""
    is_spare: bool = False
    """Whether this rank has no place: it may only call `await_place`."""
    joins: bool = False
    """Whether this rank has just taken a place, while the others go on after a loss."""

    def survivors(self) -> Self:
        """Become the transport of the living ranks that have a place after a loss, and return it.
        Collective over all living ranks, those without a place too; only for a root transport.

        First, without any message, requests and admitted threads end, and all communicators,
        windows and tenants are forgotten, those of split transports too. Then `refilled` gives the
        places of lost ranks to ranks without one, and the ranks are numbered by their places, as
        those of a whole job. If no replica is whole, the living ranks keep their places. A transport
        that is recorded gets a new recorder: the old one has names of the old ranks.

        Raises
        ------
        PeerLost
            If another rank dies meanwhile. Call it again.
        CommError
            If a thread or a request does not end.
        """
        hosts = {**self._hosts}
        around = self._connect_living()
        known = around.gather_text([self.number, self.history])
        numbers = [number for number, _ in known]
        # A loss may have kept the last places from some ranks, and only ranks with a place know the replicas.
        last = min(len(history) for _, history in known)
        before: list[Place] = next(
            (
                [Place(*place) for place in history[last - 1]]
                for number, history in known
                if number in [one for one, _ in history[last - 1]]
            ),
            [],
        )
        stayed = [place for place in before if place.number in numbers]
        places = refilled(before, hosts, {*numbers}) or stayed
        self.history = [*self.history[: last - 1], before, places]
        self.living = {number: hosts[number] for number in numbers}
        self._settle(around, [numbers.index(place.number) for place in places])
        return self

    def number_ranks(self) -> None:
        """Give each rank of a root transport the place of its rank, and a replica of its own."""
        self.number, self._hosts = self.rank, dict(enumerate(self.hosts))
        self.living = {**self._hosts}
        self.history = [[Place(rank, rank) for rank in range(self.size)]]

    def set_spares(self, is_spare: bool) -> None:
        """Make some ranks of a root transport spares, and number the others anew. Collective, once."""
        around: Any = copy(self)
        known = around.gather_text(is_spare)
        numbers = [number for number, waits in enumerate(known) if not waits]
        self.history = [[Place(number, rank) for rank, number in enumerate(numbers)]]
        self._settle(around, numbers)

    def keep_together(self, replicas: Sequence[int]) -> None:
        """State the replica of each place, as `refilled` needs it; the same on all ranks that have one."""
        last = self.history[-1]
        self.history = [
            *self.history[:-1],
            [Place(place.number, replica) for place, replica in zip(last, replicas, strict=True)],
        ]

    @property
    def had_spares(self) -> bool:
        return len(self.history[0]) < len(self._hosts)

    @property
    def spares(self) -> int:
        """The number of ranks that wait for a place, as far as is known: a dead one is missed at the next loss."""
        return len(self.living) - len(self.history[-1])

    def await_place(self) -> bool:
        """Wait until this rank has a place, almost without processor time; return whether it has one.

        If not, the job is over: rank 0 has said so, or no rank that had a place is left.
        """
        while self.is_spare and self.history[-1]:
            try:
                request = self._around.start_recv(np.zeros(1, np.uint8), self._first, DISMISSAL)
                self._around.wait_until(request.test, SPARE_PAUSE, request)
                return False
            except PeerLost:
                with suppress(PeerLost):
                    self.survivors()
                self.joins = not self.is_spare
        return not self.is_spare

    def dismiss_spares(self) -> None:
        """Let the ranks that wait for a place end; on rank 0, which needs them no more. Raises nothing."""

    # What `survivors` needs from an implementation.

    _hosts: dict[int, str]
    """{number: host} of all ranks at the start."""
    _around: Any
    """The transport of all living ranks, and in it the rank that has place 0."""
    _first: int

    def _connect_living(self) -> Any:
        """Forget what `survivors` says, and return a transport over all living ranks. Collective."""

    def _settle(self, around: Any, ranks: Sequence[int]) -> None:
        """Become the transport of these ranks of `around`, in their order; others are spares. Collective."""
