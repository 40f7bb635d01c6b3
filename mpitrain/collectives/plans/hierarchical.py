"""Two levels: an all-reduce within hosts first, so that little crosses between them; and an all-to-all
whose ranks send one message to each other host.

Each host's array is cut into columns, one per owner rank. The owners of a column, one on each
host, form a ring. Hosts may have different numbers of ranks; the smallest one sets the number of
columns.

    host A: ranks 0, 1     host B: ranks 2, 3, 4     2 columns: x and y

    1. within hosts        A  0 <--x-- 1             B  2 <--x-- 3, 4
       (reduce-scatter)    A  1 <--y-- 0             B  3 <--y-- 2, 4
    2. between hosts       column x: ring 0, 2       column y: ring 1, 3       (all-reduce)
    3. within hosts        A  0 --x--> 1             B  2 --x--> 3, 4
       (all-gather)        A  1 --y--> 0             B  3 --y--> 2, 4

In the all-to-all a rank sends all that it has for the ranks of another host to one of them, its
relay, which spreads it within that host. So 8 ranks on each of h hosts send h - 1 messages between
hosts in place of 8 (h - 1), and as many bytes.

    1. within hosts        A  0 <----> 1             B  2 <----> 3, 4
    2. to the relays       A  0 <----> B 2           A  1 <----> B 3            B  4 -----> A 0
    3. from the relays     A  0 <----> 1             B  2, 3 --> 2, 3, 4
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from mpitrain.collectives.plans import ring
from mpitrain.collectives.plans.steps import (
    Plan,
    Step,
    Transfer,
    bounds,
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


def all_to_all(
    rank: int, hosts: Sequence[str], counts: Sequence[Sequence[int]]
) -> tuple[Plan, Plan, Plan, int]:
    """Return three plans that a rank runs in turn, and the number of elements between 2 and 3.

    Plan 1 goes from the outgoing to the incoming array, plan 2 from the outgoing to a middle array of
    so many elements, and plan 3 from there to the incoming array.

    counts   counts[p][q] elements go from rank p to rank q, in the order of ranks and without gaps
    traffic  all that leaves a rank, and once more what it relays to other ranks of its host
    """
    by_host: dict[str, list[int]] = {}
    for peer, host in enumerate(hosts):
        by_host.setdefault(host, []).append(peer)
    local, n = by_host[hosts[rank]], len(hosts)
    out = bounds(counts[rank])
    into = bounds([counts[peer][rank] for peer in range(n)])

    def relay(source: int, host: str) -> int:
        ranks = by_host[host]
        return ranks[by_host[hosts[source]].index(source) % len(ranks)]

    def plan(sends: Iterable[Transfer], receives: Iterable[Transfer]) -> Plan:
        """Plan one step, without the messages that are empty."""
        sent, got = (tuple(t for t in each if t.start < t.stop) for each in (sends, receives))
        return Plan((Step(sent, got),))

    # A relay has the parts of its sources in the order of ranks, each in the order of destinations.
    sources = [s for s in range(n) if s not in local and relay(s, hosts[rank]) == rank]
    pairs = [(source, to) for source in sources for to in local]
    middle = dict(zip(pairs, bounds([counts[s][to] for s, to in pairs]), strict=True))

    def runs(ranks: list[int]) -> list[tuple[int, int]]:
        """Return the first and last of each run of ranks with following numbers: they lie side by side."""
        firsts = [r for r in ranks if r - 1 not in ranks]
        return [*zip(firsts, [r for r in ranks if r + 1 not in ranks], strict=True)]

    direct = plan((Transfer(r, *out[r]) for r in local), (Transfer(r, *into[r]) for r in local))
    between = plan(
        (
            Transfer(relay(rank, host), out[first][0], out[last][1])
            for host, ranks in by_host.items()
            if host != hosts[rank]
            for first, last in runs(ranks)
        ),
        (
            Transfer(source, middle[source, first][0], middle[source, last][1])
            for source in sources
            for first, last in runs(local)
        ),
    )
    spread = plan(
        (Transfer(to, *middle[source, to]) for source, to in pairs),
        (Transfer(relay(r, hosts[rank]), *into[r]) for r in range(n) if r not in local),
    )
    return direct, between, spread, sum(counts[s][to] for s, to in pairs)
