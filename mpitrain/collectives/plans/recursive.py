"""Recursive halving and doubling: the distance between partners halves or doubles in every step.

Partners of 8 ranks, and the elements that each rank sends in a step of an all-reduce:

    recursive doubling        step 1   0-1  2-3  4-5  6-7    count
                              step 2   0-2  1-3  4-6  5-7    count
                              step 3   0-4  1-5  2-6  3-7    count

    halving, reduce-scatter   step 1   0-4  1-5  2-6  3-7    count / 2
                              step 2   0-2  1-3  4-6  5-7    count / 4
                              step 3   0-1  2-3  4-5  6-7    count / 8
    doubling, all-gather      step 4   0-1  2-3  4-5  6-7    count / 8
                              step 5   0-2  1-3  4-6  5-7    count / 4
                              step 6   0-4  1-5  2-6  3-7    count / 2

Both need a power of two. For n = n' + r ranks, n' is the largest power of two. Of the first 2 r
ranks, each even rank first sends its array to the odd rank after it. The odd rank adds it to its
own array, and returns the result at the end. With 6 ranks:

    fold      0 -> 1   2 -> 3
    plan      for n' = 4 ranks, on ranks 1, 3, 4, 5
    return    1 -> 0   3 -> 2

source   Thakur, Rabenseifner & Gropp 2005, Int. J. High Perform. Comput. Appl. 19(1)
"""

from collections.abc import Callable
from functools import partial

from mpitrain.collectives.plans.steps import Plan, Step, Transfer, chunk_bounds, relabel, segmented


def recursive_doubling(rank: int, n: int, count: int) -> Plan:
    """Plan an all-reduce in lg n' steps that each exchange the whole array: for short arrays."""
    return _folded(_double, rank, n, count)


def halving_doubling(rank: int, n: int, count: int) -> Plan:
    """Plan Rabenseifner's all-reduce: a reduce-scatter by halving, then an all-gather by doubling.

    For powers of two it sends as few bytes as a ring, in 2 lg n' steps. The array is pipelined in
    segments: while some segments wait for one partner, others travel to the next one. So no link is
    idle between steps.
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
        # Each half has 2^bit chunks: this rank continues with its own, the peer with the other.
        own_half, peer_half = (
            (chunks[half << bit][0], chunks[(half + 1 << bit) - 1][1])
            for half in (rank >> bit, peer >> bit)
        )
        scatter.append(
            Step((Transfer(peer, *peer_half),), (Transfer(peer, *own_half),), combine=True)
        )
        gather.append(Step((Transfer(peer, *own_half),), (Transfer(peer, *peer_half),)))
    return Plan((*scatter, *reversed(gather)))


def _folded(plan: Callable[[int, int, int], Plan], rank: int, n: int, count: int) -> Plan:
    """Return a plan for n ranks from `plan`, which needs a power of two.

    The ranks outside the power of two send their arrays before it, and receive the result after it.
    """
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
