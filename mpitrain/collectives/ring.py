"""Rings: every rank sends to the next and receives from the one before, so every link works all the time.

source   Patarasuk & Yuan 2009, J. Parallel Distrib. Comput. 69(2): no all-reduce sends less from its busiest rank
"""

from mpitrain.collectives.plans import Plan, Step, Transfer, chunk_bounds


def reduce_scatter(rank: int, n: int, count: int) -> Plan:
    """n - 1 steps, after which chunk r is the reduction over all ranks on rank r; the other chunks hold partial sums.

    Chunk c sets out from rank c + 1 and gathers one rank's part per step, so its order of summation, and with it every
    bit of the result, depends on nothing but n.
    """
    chunks = chunk_bounds(count, n)
    after, before = (rank + 1) % n, (rank - 1) % n
    return Plan(tuple(
        Step(sends=(Transfer(after, *chunks[(rank - 1 - step) % n]),),
             receives=(Transfer(before, *chunks[(rank - 2 - step) % n]),), combine=True)
        for step in range(n - 1)
    ))


def all_gather(rank: int, n: int, count: int) -> Plan:
    """n - 1 steps that take chunk r from rank r to everyone."""
    chunks = chunk_bounds(count, n)
    after, before = (rank + 1) % n, (rank - 1) % n
    return Plan(tuple(
        Step(sends=(Transfer(after, *chunks[(rank - step) % n]),),
             receives=(Transfer(before, *chunks[(rank - 1 - step) % n]),))
        for step in range(n - 1)
    ))


def all_reduce(rank: int, n: int, count: int) -> Plan:
    """Reduce-scatter, then all-gather: 2(n-1) steps, 2(n-1)/n of the array sent by each rank."""
    return Plan(reduce_scatter(rank, n, count).steps + all_gather(rank, n, count).steps)
