"""Two-level all-reduce: the ranks of a host reduce first, so that little crosses between hosts.

Each host's array is cut into columns, one per owner rank. The owners of a column, one on each
host, form a ring. Hosts may have different numbers of ranks; the smallest one sets the number of
columns.

    host A: ranks 0, 1     host B: ranks 2, 3, 4     2 columns: x and y

    1. within hosts        A  0 <--x-- 1             B  2 <--x-- 3, 4
       (reduce-scatter)    A  1 <--y-- 0             B  3 <--y-- 2, 4
    2. between hosts       column x: ring 0, 2       column y: ring 1, 3       (all-reduce)
    3. within hosts        A  0 --x--> 1             B  2 --x--> 3, 4
       (all-gather)        A  1 --y--> 0             B  3 --y--> 2, 4
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


def all_reduce(rank: int, hosts: Sequence[str], count: int) -> tuple[Plan, Plan, Plan]:
    """Return three plans that a rank runs in turn: reduce within the host, between hosts, gather.

    hosts    host name of every rank
    traffic  an owner sends all other columns within its host, then 2 x (h - 1) / h of its column to
             other hosts (h hosts), then its column to each other rank of its host
    """
    by_host: dict[str, list[int]] = {}
    for peer, host in enumerate(hosts):
        by_host.setdefault(host, []).append(peer)
    local = by_host[hosts[rank]]
    columns = chunk_bounds(count, min(len(ranks) for ranks in by_host.values()))
    inward = _to_columns(rank, local, columns)
    return inward, _around(rank, list(by_host.values()), columns), reverse(inward, combine=False)


def _to_columns(rank: int, local: list[int], columns: list[tuple[int, int]]) -> Plan:
    """Plan the first level: the owners of a host add up their columns of all its ranks' arrays."""
    owners = local[: len(columns)]
    sends = tuple(
        Transfer(owner, *column)
        for owner, column in zip(owners, columns, strict=True)
        if owner != rank
    )
    if rank not in owners:
        return Plan((Step(sends),))
    own_column = columns[owners.index(rank)]
    return Plan(
        (
            Step(
                sends,
                tuple(Transfer(peer, *own_column) for peer in local if peer != rank),
                combine=True,
            ),
        )
    )


def _around(rank: int, hosts: list[list[int]], columns: list[tuple[int, int]]) -> Plan:
    """Plan the second level: a ring over the owners of one column, one owner on each host.

    The plan of a rank that owns no column is empty.
    """
    column = next(ranks.index(rank) for ranks in hosts if rank in ranks)
    if column >= len(columns):
        return Plan(())
    members = [ranks[column] for ranks in hosts]
    start, stop = columns[column]
    return relabel(ring.all_reduce(members.index(rank), len(members), stop - start), members, start)


def segments_of(hosts: Sequence[str], count: int) -> int:
    """Return the number of segments of each chunk in the ring between hosts (step 2 above)."""
    ranks = Counter(hosts)
    return segments(len(ranks), count // min(ranks.values()))
