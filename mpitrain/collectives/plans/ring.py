"""Rings: every rank sends to the next rank and receives from the previous one.

All links work all the time, and no all-reduce sends fewer bytes from its busiest rank.

The drawing shows 3 ranks; each step of it is one round. A cell names the ranks that a chunk
(c0, c1 or c2) sums so far. In each step, rank r sends the chunk in brackets to rank r + 1.

    reduce-scatter    start                after step 1         after step 2
                      c0    c1    c2       c0    c1    c2       c0    c1    c2
    rank 0            0     0    [0]       0    [02]   0        012   02    0
    rank 1           [1]    1     1        1     1    [01]      1     012   01
    rank 2            2    [2]    2       [12]   2     2        12    2     012

    all-gather        start                after step 1         after step 2
                      c0    c1    c2       c0    c1    c2       c0    c1    c2
    rank 0           [012]  .     .        012   .    [012]     012   012   012
    rank 1            .    [012]  .       [012]  012   .        012   012   012
    rank 2            .     .    [012]     .    [012]  012      012   012   012

source   Patarasuk & Yuan 2009, J. Parallel Distrib. Comput. 69(2)
"""

from functools import lru_cache

from mpitrain.collectives.plans.steps import (
    DEPTH,
    Plan,
    Step,
    Transfer,
    chunk_bounds,
    pieces,
    segments,
)


def reduce_scatter(rank: int, n: int, count: int) -> Plan:
    """Plan a ring reduce-scatter in n - 1 rounds: chunk r ends as the reduction on rank r.

    The other chunks end as partial sums. Chunk c starts from rank c + 1, and every round adds the
    elements of one more rank. The order of summation, and so every bit, depends only on n.
    """
    return _rounds(rank, n, count, first=rank - 1, combine=True)


def all_gather(rank: int, n: int, count: int) -> Plan:
    """Plan a ring all-gather in n - 1 rounds: chunk r of rank r ends on every rank."""
    return _rounds(rank, n, count, first=rank, combine=False)


def all_reduce(rank: int, n: int, count: int) -> Plan:
    """Plan a ring all-reduce: a reduce-scatter, then an all-gather.

    traffic  2 (n - 1) rounds, in which each rank sends 2 (n - 1) / n of the array
    """
    scatter = reduce_scatter(rank, n, count)
    return Plan(scatter.steps + all_gather(rank, n, count).steps, scatter.depth)


def shift(rank: int, n: int, count: int, distance: int = 1) -> Plan:
    """Plan one step in which the array of each rank r goes to rank r + distance."""
    to, source = (rank + distance) % n, (rank - distance) % n
    return Plan((Step((Transfer(to, 0, count),), (Transfer(source, 0, count),)),))


def _rounds(rank: int, n: int, count: int, first: int, combine: bool) -> Plan:
    """Plan n - 1 rounds: send chunk `first`, then in each round the chunk received in the last one.

    A rank received the segment that it sends `segments` steps earlier. Hence at most `segments`
    steps may be in flight at once.
    """
    cut = _segments(n, count)
    after, before = (rank + 1) % n, (rank - 1) % n
    return Plan(
        tuple(
            Step((Transfer(after, *outgoing),), (Transfer(before, *incoming),), combine)
            for step in range(n - 1)
            for outgoing, incoming in zip(
                cut[(first - step) % n], cut[(first - step - 1) % n], strict=True
            )
        ),
        depth=min(DEPTH, len(cut[0])),
    )


@lru_cache(1)
def _segments(n: int, count: int) -> list[list[tuple[int, int]]]:
    """Return (start, stop) of the segments of each chunk, which all ranks share."""
    per_round = segments(n, count)
    return [pieces(*chunk, per_round) for chunk in chunk_bounds(count, n)]
