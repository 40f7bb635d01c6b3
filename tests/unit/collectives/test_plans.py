"""How many steps the plans of all ranks take together, by the published formulas: no ranks, no clock."""

from collections import defaultdict

import pytest

from mpitrain.collectives.selection import table as algorithm_table

RANKS = range(1, 9)
COUNT = 840  # whole chunks for 1 to 8 ranks


def steps(plans):
    """Steps until the last rank is done, if every message takes one from the moment that both its ends are ready."""
    ends = defaultdict(
        lambda: defaultdict(list)
    )  # of messages: {(source, target): {number: [(rank, step), (rank, step)]}}
    sent, received = defaultdict(int), defaultdict(int)
    for rank, plan in enumerate(plans):
        for i, step in enumerate(plan.steps):
            for ways, counted in ((step.sends, sent), (step.receives, received)):
                for transfer in ways:
                    pair = (rank, transfer.peer) if counted is sent else (transfer.peer, rank)
                    if transfer.peer != rank:
                        ends[pair][counted[pair]].append((rank, i))
                        counted[pair] += 1
    messages = [both for numbers in ends.values() for both in numbers.values()]
    assert all(len(both) == 2 for both in messages), "a message has two ends"
    done = {(rank, i): 0 for rank, plan in enumerate(plans) for i in range(len(plan.steps))}
    while True:

        def ready(rank, i):
            return max(
                (done[rank, before] for before in range(i - plans[rank].depth + 1)),  # noqa: B023
                default=0,
            )

        later = {place: ready(*place) for place in done}
        for both in messages:
            end = max(ready(*place) for place in both) + 1
            for place in both:
                later[place] = max(later[place], end)
        if later == done:
            return max(done.values(), default=0)
        done = later


def lg(n):
    """The largest k with 2^k <= n."""
    return n.bit_length() - 1


def ceil_lg(n):
    """The smallest k with 2^k >= n."""
    return (n - 1).bit_length()


FORMULAS = {
    "allreduce ring": lambda n: 2 * (n - 1),
    "allreduce halving-doubling": lambda n: 2 * lg(n) + (2 if n > 1 << lg(n) else 0),
    "allreduce recursive-doubling": lambda n: lg(n) + (2 if n > 1 << lg(n) else 0),
    "allreduce tree": lambda n: 2 * ceil_lg(n),
    "allreduce star": lambda n: min(2, 2 * (n - 1)),
    "reduce-scatter ring": lambda n: n - 1,
    "reduce-scatter bruck": ceil_lg,
    "reduce-scatter pairwise": lambda n: n - 1,
    "all-gather ring": lambda n: n - 1,
    "all-gather bruck": ceil_lg,
    "all-gather pairwise": lambda n: n - 1,
    "all-to-all pairwise": lambda n: n - 1,
    "all-to-all at-once": lambda n: min(1, n - 1),
    "broadcast binomial": ceil_lg,
    "reduce binomial": ceil_lg,
}


@pytest.mark.product
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("name", FORMULAS)
def test_all_ranks_together_take_the_steps_of_the_formula(name, n):
    operation, algorithm = name.split()
    for root in range(n) if operation in ("broadcast", "reduce") else [None]:
        where = () if root is None else (root,)
        plans = [
            algorithm_table.PLANS[operation][algorithm](rank, n, COUNT, *where)
            if operation in algorithm_table.PLANS
            else algorithm_table.TABLES[operation][algorithm].plans(rank, ("here",) * n, COUNT)[0]
            for rank in range(n)
        ]
        assert steps(plans) == FORMULAS[name](n)
