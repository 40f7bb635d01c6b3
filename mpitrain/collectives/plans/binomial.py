"""Binomial trees: the number of ranks that have the data doubles in every step."""

from mpitrain.collectives.plans.steps import Plan, Step, Transfer, reverse


def broadcast(rank: int, n: int, count: int, root: int = 0) -> Plan:
    """Plan a broadcast from the root to all ranks in ceil(lg n) steps.

    Number the ranks from the root. Rank v without its highest bit is the rank that sends to v, in
    the step of that bit. Rank v sends in all later steps.

    traffic  ceil(lg n) arrays from the root, n - 1 arrays from all ranks together
    """
    seen = (rank - root) % n
    steps = []
    for bit in range((n - 1).bit_length()):
        peer = seen ^ (1 << bit)
        transfer = (Transfer((peer + root) % n, 0, count),)
        if seen < 1 << bit and peer < n:
            steps.append(Step(sends=transfer))
        elif 1 << bit <= seen < 2 << bit:
            steps.append(Step(receives=transfer))
    return Plan(tuple(steps))


def reduce(rank: int, n: int, count: int, root: int = 0) -> Plan:
    """Plan a reduction to the root: the steps of the broadcast in reverse order.

    Every other rank sends its array once. Its array ends as a partial reduction.
    """
    return reverse(broadcast(rank, n, count, root), combine=True)


def all_reduce(rank: int, n: int, count: int) -> Plan:
    """Plan a reduction to rank 0, then a broadcast, for short arrays on many ranks.

    traffic  2 ceil(lg n) steps
    """
    return Plan(reduce(rank, n, count).steps + broadcast(rank, n, count).steps)
