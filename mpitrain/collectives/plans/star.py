"""Star: everything to or from one rank. What rings and trees are compared with: that rank's link carries it all."""

from mpitrain.collectives.plans import ring
from mpitrain.collectives.plans.steps import Plan, Step, Transfer, chunk_bounds, reverse


def all_reduce(rank: int, n: int, count: int) -> Plan:
    """Two steps; rank 0 reduces in the order of ranks, sends n - 1 times the array, and needs scratch for as much."""
    if rank > 0:
        whole = (Transfer(0, 0, count),)
        return Plan((Step(sends=whole), Step(receives=whole)))
    everyone = tuple(Transfer(peer, 0, count) for peer in range(1, n))
    return Plan((Step(receives=everyone, combine=True), Step(sends=everyone)))


def scatter(rank: int, n: int, count: int, root: int = 0) -> Plan:
    """One step; chunk r goes from root to rank r."""
    chunks = chunk_bounds(count, n)
    if rank != root:
        return Plan((Step(receives=(Transfer(root, *chunks[rank]),)),))
    return Plan(
        (Step(sends=tuple(Transfer(peer, *chunks[peer]) for peer in range(n) if peer != root)),)
    )


def broadcast(rank: int, n: int, count: int, root: int = 0) -> Plan:
    """Scatter, then a ring all-gather: 2 (n-1)/n of the array from the root, for long arrays. van de Geijn's."""
    gather = ring.all_gather(rank, n, count)
    return Plan(scatter(rank, n, count, root).steps + gather.steps)


def reduce(rank: int, n: int, count: int, root: int = 0) -> Plan:
    """A ring reduce-scatter, then every chunk to the root: 2 (n-1)/n of the array at most, for long arrays."""
    scattered = ring.reduce_scatter(rank, n, count)
    return Plan(scattered.steps + reverse(scatter(rank, n, count, root), combine=False).steps)
