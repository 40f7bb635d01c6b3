"""Rings: every rank sends to the next and receives from the one before, so every link works all the time.

source   Patarasuk & Yuan 2009, J. Parallel Distrib. Comput. 69(2): no all-reduce sends less from its busiest rank
"""

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
    """n - 1 rounds, after which chunk r is the reduction over all ranks on rank r; the other chunks hold partial sums.

    Chunk c sets out from rank c + 1 and gathers one rank's part per round, so its order of summation, and with it every
    bit of the result, depends on nothing but n.
    """
    return _rounds(rank, n, count, first=rank - 1, combine=True)


def all_gather(rank: int, n: int, count: int) -> Plan:
    """n - 1 rounds that take chunk r from rank r to everyone."""
    return _rounds(rank, n, count, first=rank, combine=False)


def all_reduce(rank: int, n: int, count: int) -> Plan:
    """Reduce-scatter, then all-gather: 2(n-1) rounds, 2(n-1)/n of the array sent by each rank."""
    scatter = reduce_scatter(rank, n, count)
    return Plan(scatter.steps + all_gather(rank, n, count).steps, scatter.depth)


def _rounds(rank: int, n: int, count: int, first: int, combine: bool) -> Plan:
    """n - 1 rounds that begin by sending chunk `first`, and send on in each what came in the one before.

    A segment that is sent arrived `segments` steps earlier, hence no more than that many steps may be under way.
    """
    chunks, per_round = chunk_bounds(count, n), segments(n, count)
    after, before = (rank + 1) % n, (rank - 1) % n
    return Plan(
        tuple(
            Step((Transfer(after, *outgoing),), (Transfer(before, *incoming),), combine)
            for step in range(n - 1)
            for outgoing, incoming in zip(
                pieces(*chunks[(first - step) % n], per_round),
                pieces(*chunks[(first - step - 1) % n], per_round),
                strict=True,
            )
        ),
        depth=min(DEPTH, per_round),
    )
