"""Recursive halving and doubling: the distance between partners doubles or halves with every step.

Both need a power of two. With n = n' + r ranks, n' the largest power of two, the first 2r ranks pair up: the even one
folds its array into its neighbour's beforehand and gets the result afterwards.

source   Thakur, Rabenseifner & Gropp 2005, Int. J. High Perform. Comput. Appl. 19(1)
"""

from collections.abc import Callable
from functools import partial

from mpitrain.collectives.plans.steps import Plan, Step, Transfer, chunk_bounds, relabel, segmented


def recursive_doubling(rank: int, n: int, count: int) -> Plan:
    """lg n' steps, each exchanging the whole array: the fewest steps, for short arrays."""
    return _folded(_double, rank, n, count)


def halving_doubling(rank: int, n: int, count: int) -> Plan:
    """Reduce-scatter by halving, all-gather by doubling: as few bytes as a ring in 2 lg n' steps. Rabenseifner's.

    In segments: while some wait for one partner, others are exchanged with the next, and no link rests between the steps.
    """
    return segmented(partial(_folded, _halve_and_double), rank, n, count)


def _double(rank: int, n: int, count: int) -> Plan:
    whole = [(Transfer(rank ^ (1 << bit), 0, count),) for bit in range(n.bit_length() - 1)]
    return Plan(tuple(Step(transfer, transfer, combine=True) for transfer in whole))


def _halve_and_double(rank: int, n: int, count: int) -> Plan:
    chunks = chunk_bounds(count, n)
    scatter, gather = [], []
    for bit in reversed(range(n.bit_length() - 1)):
        peer = rank ^ (1 << bit)
        mine, theirs = (  # 2^bit chunks each: the half that this rank goes on with, and its peer's
            (chunks[half << bit][0], chunks[(half + 1 << bit) - 1][1])
            for half in (rank >> bit, peer >> bit)
        )
        scatter.append(Step((Transfer(peer, *theirs),), (Transfer(peer, *mine),), combine=True))
        gather.append(Step((Transfer(peer, *mine),), (Transfer(peer, *theirs),)))
    return Plan((*scatter, *reversed(gather)))


def _folded(plan: Callable[[int, int, int], Plan], rank: int, n: int, count: int) -> Plan:
    """A plan for a power of two, with the ranks above it folded in before and served after."""
    power = 1 << (n.bit_length() - 1)
    folded = n - power
    active = [*range(1, 2 * folded, 2), *range(2 * folded, n)]
    whole = (Transfer(rank ^ 1, 0, count),)
    if rank not in active:
        return Plan((Step(sends=whole), Step(receives=whole)))
    steps = relabel(plan(active.index(rank), power, count), active).steps
    if rank >= 2 * folded:
        return Plan(steps)
    return Plan((Step(receives=whole, combine=True), *steps, Step(sends=whole)))
