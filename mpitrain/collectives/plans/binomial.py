"""Binomial trees: the ranks that have the data double with every step."""

from mpitrain.collectives.plans.steps import Plan, Step, Transfer, reverse


def broadcast(rank: int, n: int, count: int, root: int = 0) -> Plan:
    """ceil(lg n) steps from root to all; the root sends the array ceil(lg n) times, all ranks together n - 1 times.

    Seen from the root, rank v receives from v without its highest bit, at the step of that bit, and sends from then on.
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
    """The broadcast backwards: root's array ends as the reduction, the others hold partial ones; each sends it once."""
    return reverse(broadcast(rank, n, count, root), combine=True)


def all_reduce(rank: int, n: int, count: int) -> Plan:
    """Reduce to rank 0, then broadcast: 2 ceil(lg n) steps, for short arrays on many ranks."""
    return Plan(reduce(rank, n, count).steps + broadcast(rank, n, count).steps)
