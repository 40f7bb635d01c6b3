"""Routes: the counts of an all-to-all whose parts differ in length, and its messages, there and back.

A program chooses at each call who gets how many rows (MPI_Alltoallv): the ranks exchange counts
first, then rows. All ranks know all counts, so they choose one algorithm, and each can plan for the
rows that it relays.
"""

from typing import Any

import numpy as np

from mpitrain.collectives.engine.compose import Chain
from mpitrain.collectives.engine.executor import BETWEEN_HOSTS, Execution, Reduction
from mpitrain.collectives.plans import hierarchical
from mpitrain.collectives.plans.exchanges import all_to_all_of

ROUTES = ("pairwise", "hierarchical")
"""The algorithms of an all-to-all of unequal counts."""

TAGS = 64
"""Tags that the messages of a group's routes take in turn; so many plans may be under way at once."""


class Routes:
    """The rows that each rank of a group sends to each other one, once all ranks know the counts.

    counts     (n, n, k) int64: counts[p, q] are the rows of the k parts that rank p sends to rank q
    algorithm  "pairwise", or "hierarchical": through relays on other hosts; "auto" takes relays where
               ranks share hosts and the messages between hosts would be shorter than BETWEEN_HOSTS
    """

    def __init__(self, group: Any, counts: np.ndarray):
        self.counts, self._group, self._transport = counts, group, group.transport
        self._rows = counts.sum(axis=2)
        self.algorithm = group.algorithm if group.algorithm in ROUTES else "auto"

    @property
    def sent(self) -> int:
        """Rows that this rank sends, its own included."""
        return int(self._rows[self._transport.rank].sum())

    @property
    def received(self) -> int:
        """Rows that this rank receives, its own included."""
        return int(self._rows[:, self._transport.rank].sum())

    def bind(self, outgoing: Any, incoming: Any, is_return: bool = False) -> Reduction:
        """Bind the messages of rows to two arrays that do not overlap. Without messages; all ranks bind.

        outgoing   (sent, ...) contiguous, in the order of the ranks that they go to
        incoming   (received, ...), the same dtype and dims after the first, in the order of the ranks
                   that they come from
        is_return  the way back: outgoing is (received, ...) and incoming (sent, ...)
        """
        return self._group._noted(
            "all-to-all", outgoing, lambda: self._bound(outgoing, incoming, is_return)
        )

    def _bound(self, outgoing: Any, incoming: Any, is_return: bool) -> Reduction:
        transport, rows = self._transport, self._rows.T if is_return else self._rows
        width = int(np.prod(outgoing.shape[1:], dtype=np.int64))
        elements, rank = (rows * width).tolist(), transport.rank

        def execution(plan: Any, source: Any, target: Any) -> Execution:
            return Execution(transport, target, "add", plan, self._group._next_route_tag(), source)

        hosts = transport.hosts
        if self._is_relayed(width * outgoing.dtype.itemsize):
            *plans, length = hierarchical.all_to_all(rank, hosts, elements)
            middle = np.empty_like(incoming, shape=length)
            arrays = (outgoing, incoming), (outgoing, middle), (middle, incoming)
            links = [execution(plan, *ends) for plan, ends in zip(plans, arrays, strict=True)]
            bound: Reduction = Chain(links)
            bound.algorithm = "hierarchical"
        else:
            received = [each[rank] for each in elements]
            bound = execution(all_to_all_of(rank, elements[rank], received), outgoing, incoming)
            bound.algorithm = "pairwise"
        bound.exposed = self._group.exposed
        return bound

    def _is_relayed(self, row_bytes: int) -> bool:
        hosts = self._transport.hosts
        if not 1 < len(set(hosts)) < len(hosts):
            return False
        if self.algorithm != "auto":
            return self.algorithm == "hierarchical"
        pairs = [
            (p, q) for p, here in enumerate(hosts) for q, there in enumerate(hosts) if here != there
        ]
        return sum(self._rows[pair] for pair in pairs) * row_bytes < BETWEEN_HOSTS * len(pairs)


def route_bytes(
    rank: int, hosts: tuple[str, ...], rows: np.ndarray, row_bytes: int, algorithm: str
) -> int:
    """Return the bytes that a rank sends in one direction: the formula of an all-to-all of unequal counts.

    Every row that leaves the rank, and, through relays, those of other hosts that it passes on.

    rows  (n, n): rows[p, q] go from rank p to rank q
    """
    sent = int(rows[rank].sum() - rows[rank, rank])
    if algorithm == "hierarchical":
        on_host = [r for r, host in enumerate(hosts) if host == hosts[rank]]
        for source, host in enumerate(hosts):
            number = [r for r, other in enumerate(hosts) if other == host].index(source)
            if host != hosts[rank] and on_host[number % len(on_host)] == rank:
                sent += int(sum(rows[source, to] for to in on_host if to != rank))
    return sent * row_bytes
