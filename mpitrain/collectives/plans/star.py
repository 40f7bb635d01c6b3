"""Star: rank 0 or the root sends and receives everything.

Its link carries all messages; rings and trees are compared with it.
"""

from mpitrain.collectives.plans import ring
from mpitrain.collectives.plans.steps import Plan, Step, Transfer, chunk_bounds, reverse


def all_reduce(rank: int, n: int, count: int) -> Plan:
    """Plan an all-reduce in two steps: every rank sends to rank 0, which sends the result to all.

    Rank 0 reduces in the order of ranks. It sends n - 1 arrays, and needs scratch of the same size.
    """
    if rank > 0:
        whole = (Transfer(0, 0, count),)
        return Plan((Step(sends=whole), Step(receives=whole)))
    everyone = tuple(Transfer(peer, 0, count) for peer in range(1, n))
    return Plan((Step(receives=everyone, combine=True), Step(sends=everyone)))


def scatter(rank: int, n: int, count: int, root: int = 0) -> Plan:
    """Plan a scatter in one step: chunk r goes from the root to rank r."""
    chunks = chunk_bounds(count, n)
    if rank != root:
        return Plan((Step(receives=(Transfer(root, *chunks[rank]),)),))
    return Plan(
        (Step(sends=tuple(Transfer(peer, *chunks[peer]) for peer in range(n) if peer != root)),)
    )


def broadcast(rank: int, n: int, count: int, root: int = 0) -> Plan:
    """Plan van de Geijn's broadcast for long arrays: a scatter, then a ring all-gather.

    traffic  the root sends 2 (n - 1) / n of the array
    """
    gather = ring.all_gather(rank, n, count)
    return Plan(scatter(rank, n, count, root).steps + gather.steps)


def reduce(rank: int, n: int, count: int, root: int = 0) -> Plan:
    """Plan a reduction for long arrays: a ring reduce-scatter, then every chunk goes to the root.

    traffic  a rank sends at most the array once; the root receives 2 (n - 1) / n of it
    """
    scattered = ring.reduce_scatter(rank, n, count)
    return Plan(scattered.steps + reverse(scatter(rank, n, count, root), combine=False).steps)
