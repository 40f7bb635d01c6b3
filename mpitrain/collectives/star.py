"""Star: everything to rank 0 and back. What a ring is compared with: rank 0 sends n - 1 times the array."""

from mpitrain.collectives.plans import Plan, Step, Transfer


def all_reduce(rank: int, n: int, count: int) -> Plan:
    """Two steps; rank 0 reduces in the order of ranks, and needs scratch for n - 1 arrays."""
    if rank > 0:
        whole = (Transfer(0, 0, count),)
        return Plan((Step(sends=whole), Step(receives=whole)))
    everyone = tuple(Transfer(peer, 0, count) for peer in range(1, n))
    return Plan((Step(receives=everyone, combine=True), Step(sends=everyone)))
