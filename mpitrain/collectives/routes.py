"""Routes: the counts of an all-to-all whose parts differ in length, and its messages, there and back.

A program chooses at each call who gets how many rows (MPI_Alltoallv): the ranks exchange counts
first, then rows. All ranks know all counts, so they choose one algorithm, and each can plan for the
rows that it relays.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from mpitrain.collectives.engine.compose import Chain
from mpitrain.collectives.engine.executor import BETWEEN_HOSTS, Execution, Reduction
from mpitrain.collectives.plans import hierarchical
from mpitrain.collectives.plans.exchanges import all_to_all_of
from mpitrain.machine.backend import on_device
from mpitrain.transport.base import Request
from mpitrain.transport.native import MOST, start_native_all_to_all

ROUTES = ("pairwise", "hierarchical", "native")
"""The algorithms of an all-to-all of unequal counts."""

TAGS = 64
"""Tags that the messages of a group's routes take in turn; so many plans may be under way at once."""


class NativeRows(Reduction):
    """The messages of rows as one call of the MPI library, which needs no plan."""

    is_messages = False
    algorithm = "native"

    def __init__(self, start: Callable[[], Request]):
        self._call = start

    def _steps(self) -> Iterator[Request]:
        yield self._call()


class Routes:
    """The rows that each rank of a group sends to each other one, once all ranks know the counts.

    counts  (n, n, k) int64: counts[p, q] are the rows of the k parts that rank p sends to rank q

    The algorithm is that of the group, or "auto" takes
    native        on one host, for arrays in host memory. There it was as fast or faster for all sizes:
                  a plan costs more than a short message. MPI takes at most MOST elements. Ranks that
                  outlive a loss use messages of their own, which they can cancel
    hierarchical  where ranks share hosts and the messages between hosts would be shorter than BETWEEN_HOSTS
    pairwise      else
    """

    def __init__(self, group: Any, counts: np.ndarray):
        self.counts, self._group, self._transport = counts, group, group.transport
        self._rows, rank = counts.sum(axis=2), group.rank
        self._sent, self._received = self._rows[rank].tolist(), self._rows[:, rank].tolist()
        self.sent, self.received = sum(self._sent), sum(self._received)
        """Rows that this rank sends and receives, its own included."""

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
        transport, width = self._transport, math.prod(outgoing.shape[1:])
        ways = self._received, self._sent, self._rows.T
        to, source, rows = ways if is_return else (self._sent, self._received, self._rows)
        sent, received = [count * width for count in to], [count * width for count in source]
        ends = outgoing.reshape(-1), incoming.reshape(-1)

        def execution(plan: Any, source: Any, target: Any) -> Execution:
            return Execution(transport, target, "add", plan, self._group._next_route_tag(), source)

        algorithm = self._algorithm(outgoing, width)
        if algorithm == "native":
            bound: Reduction = NativeRows(
                partial(start_native_all_to_all, transport, *ends, sent, received)
            )
        elif algorithm == "hierarchical":
            elements = (rows * width).tolist()
            *plans, length = hierarchical.all_to_all(transport.rank, transport.hosts, elements)
            middle = np.empty_like(incoming, shape=length)
            arrays = (outgoing, incoming), (outgoing, middle), (middle, incoming)
            bound = Chain(
                [execution(plan, *pair) for plan, pair in zip(plans, arrays, strict=True)]
            )
        else:
            bound = execution(all_to_all_of(transport.rank, sent, received), *ends)
        bound.algorithm, bound.exposed = algorithm, self._group.exposed
        return bound

    def _algorithm(self, array: Any, width: int) -> str:
        asked, transport = self._group.algorithm, self._transport
        is_auto, hosts = asked not in ROUTES, transport.hosts
        is_one_host = hosts.count(hosts[0]) == len(hosts)
        has_relays = not is_one_host and len(set(hosts)) < len(hosts)
        if has_relays and (asked == "hierarchical" or (is_auto and self._is_short(array, width))):
            return "hierarchical"
        can_be_native = not on_device(array) and int(self._rows.sum()) * width <= MOST
        is_best = is_auto and is_one_host and transport.needs_all
        return "native" if can_be_native and (is_best or asked == "native") else "pairwise"

    def _is_short(self, array: Any, width: int) -> bool:
        """Return whether the mean message between hosts is shorter than BETWEEN_HOSTS."""
        hosts = np.array(self._transport.hosts)
        between = self._rows[hosts[:, None] != hosts]
        return bool(between.mean() * width * array.itemsize < BETWEEN_HOSTS)


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
