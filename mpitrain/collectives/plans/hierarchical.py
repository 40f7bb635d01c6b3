"""Two levels: ranks of one host gather what they have, so that little crosses the links between hosts.

A host's array is cut among its ranks; the ranks that hold the same cut on every host, a column, form a ring. Hosts may
have different numbers of ranks: there are as many columns as the smallest host has ranks.
"""

from collections import Counter
from collections.abc import Sequence

from mpitrain.collectives.plans import ring
from mpitrain.collectives.plans.steps import (
    Plan,
    Step,
    Transfer,
    chunk_bounds,
    relabel,
    reverse,
    segments,
)
from mpitrain.collectives.plans.topology import Topology


def all_reduce(rank: int, hosts: Sequence[str], count: int) -> tuple[Plan, Plan, Plan]:
    """Three plans to run one after the other: onto the host's columns, around the hosts, back to the host's ranks.

    hosts    host name of every rank
    traffic  a rank sends its array but for what it keeps, 2(h-1)/h of its column between h hosts, its column to each
             other rank of the host
    """
    by_host: dict[str, list[int]] = {}
    for peer, host in enumerate(hosts):
        by_host.setdefault(host, []).append(peer)
    local = by_host[hosts[rank]]
    columns = chunk_bounds(count, min(len(ranks) for ranks in by_host.values()))
    inward = _to_columns(rank, local, columns)
    return inward, _around(rank, list(by_host.values()), columns), reverse(inward, combine=False)


def _to_columns(rank: int, local: list[int], columns: list[tuple[int, int]]) -> Plan:
    """Every rank of the host sends each column to the rank that owns it, which adds them up."""
    owners = local[: len(columns)]
    sends = tuple(
        Transfer(owner, *column)
        for owner, column in zip(owners, columns, strict=True)
        if owner != rank
    )
    if rank not in owners:
        return Plan((Step(sends),))
    mine = columns[owners.index(rank)]
    return Plan(
        (Step(sends, tuple(Transfer(peer, *mine) for peer in local if peer != rank), combine=True),)
    )


def _around(rank: int, hosts: list[list[int]], columns: list[tuple[int, int]]) -> Plan:
    """A ring of the ranks that own one column, one of each host; nothing for a rank that owns none."""
    column = next(ranks.index(rank) for ranks in hosts if rank in ranks)
    if column >= len(columns):
        return Plan(())
    members = [ranks[column] for ranks in hosts]
    start, stop = columns[column]
    return relabel(ring.all_reduce(members.index(rank), len(members), stop - start), members, start)


def segments_of(hosts: Sequence[str], count: int) -> int:
    """Into how many segments the chunks of a column's ring are cut."""
    ranks = Counter(hosts)
    return segments(len(ranks), count // min(ranks.values()))


def is_rival(situation: Topology) -> bool:
    """Of several hosts, one of which has several ranks."""
    return 1 < len(set(situation.hosts)) < len(situation.hosts)
