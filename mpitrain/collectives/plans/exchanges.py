"""Plans without a ring: trees, stars, pairwise exchanges, recursive halving and doubling."""

from collections.abc import Callable, Sequence
from functools import partial

from mpitrain.collectives.plans import ring
from mpitrain.collectives.plans.steps import (
    DEPTH,
    Plan,
    Step,
    Transfer,
    at_once,
    bounds,
    chunk_bounds,
    relabel,
    reverse,
    segmented,
)

# Binomial trees: the number of ranks that have the data doubles in every step.


def tree_broadcast(rank: int, n: int, count: int, root: int = 0) -> Plan:
    """Plan a broadcast from the root to all ranks in ceil(lg n) steps.

    Let v be the number of a rank, counted from the root. It receives the array in the step of the
    highest bit of v, from the rank whose number is v without this bit. It sends in all later steps.

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


def tree_reduce(rank: int, n: int, count: int, root: int = 0) -> Plan:
    """Plan a reduction to the root: the steps of the broadcast in reverse order.

    Every other rank sends its array once. Its array ends as a partial reduction.
    """
    return reverse(tree_broadcast(rank, n, count, root), combine=True)


def tree_all_reduce(rank: int, n: int, count: int) -> Plan:
    """Plan a reduction to rank 0, then a broadcast: 2 ceil(lg n) steps, for short arrays."""
    return Plan(tree_reduce(rank, n, count).steps + tree_broadcast(rank, n, count).steps)


# Stars: rank 0 or the root sends and receives everything, so its link carries all messages.


def star_all_reduce(rank: int, n: int, count: int) -> Plan:
    """Plan an all-reduce in two steps: every rank sends to rank 0, which sends the result to all.

    Rank 0 reduces in the order of ranks. It sends n - 1 arrays, and needs scratch of the same size.
    """
    if rank > 0:
        whole = (Transfer(0, 0, count),)
        return Plan((Step(sends=whole), Step(receives=whole)))
    everyone = tuple(Transfer(peer, 0, count) for peer in range(1, n))
    return Plan((Step(receives=everyone, combine=True), Step(sends=everyone)))


def _scatter(rank: int, n: int, count: int, root: int) -> Plan:
    """Plan a scatter in one step: chunk r goes from the root to rank r."""
    chunks = chunk_bounds(count, n)
    if rank != root:
        return Plan((Step(receives=(Transfer(root, *chunks[rank]),)),))
    return Plan(
        (Step(sends=tuple(Transfer(peer, *chunks[peer]) for peer in range(n) if peer != root)),)
    )


def scatter_ring_broadcast(rank: int, n: int, count: int, root: int = 0) -> Plan:
    """Plan van de Geijn's broadcast for long arrays: a scatter, then a ring all-gather.

    traffic  the root sends 2 (n - 1) / n of the array
    """
    gather = ring.all_gather(rank, n, count)
    return Plan(_scatter(rank, n, count, root).steps + gather.steps)


def ring_gather_reduce(rank: int, n: int, count: int, root: int = 0) -> Plan:
    """Plan a reduction for long arrays: a ring reduce-scatter, then every chunk goes to the root.

    traffic  a rank sends at most the array once; the root receives 2 (n - 1) / n of it
    """
    scattered = ring.reduce_scatter(rank, n, count)
    return Plan(scattered.steps + reverse(_scatter(rank, n, count, root), combine=False).steps)


# Pairwise exchanges: in step s, rank r sends to rank r + s, and no two messages share a link. Each
# chunk goes straight to its destination, so compressed messages are rounded only once.


def pairwise_reduce_scatter(rank: int, n: int, count: int) -> Plan:
    """Plan a reduce-scatter in n - 1 steps: rank r alone sums chunk r.

    Rank r starts with its own elements, and adds the elements of ranks r - 1, r - 2 ... in turn.
    """
    chunks = chunk_bounds(count, n)
    return Plan(
        tuple(
            Step(
                (Transfer((rank + step) % n, *chunks[(rank + step) % n]),),
                (Transfer((rank - step) % n, *chunks[rank]),),
                True,
            )
            for step in range(1, n)
        )
    )


def pairwise_all_gather(rank: int, n: int, count: int) -> Plan:
    """Plan an all-gather in n - 1 steps: chunk r goes from rank r to each other rank."""
    chunks = chunk_bounds(count, n)
    return Plan(
        tuple(
            Step(
                (Transfer((rank + step) % n, *chunks[rank]),),
                (Transfer((rank - step) % n, *chunks[(rank - step) % n]),),
            )
            for step in range(1, n)
        )
    )


# Bruck's distances: in each step a rank sends all chunks that it has to the rank `held` before it, and
# receives as many from the rank `held` after it. Rank 0 of 5 has chunk 0, then 0-1, 0-3, 0-4. Runs of
# chunks that go on behind the last chunk are two messages.
#
# source   Bruck et al. 1997, IEEE Trans. Parallel Distrib. Syst. 8(11)


def bruck_all_gather(rank: int, n: int, count: int) -> Plan:
    """Plan an all-gather in ceil(lg n) steps, of as few bytes as a ring."""
    chunks = chunk_bounds(count, n)

    def run(first: int, number: int, peer: int) -> tuple[Transfer, ...]:
        first %= n
        runs = (first, min(n, first + number)), (0, first + number - n)
        return tuple(
            Transfer(peer % n, chunks[start][0], chunks[stop - 1][1])
            for start, stop in runs
            if start < stop
        )

    steps, held = list[Step](), 1
    while held < n:
        moved = min(held, n - held)
        sent, received = run(rank, moved, rank - held), run(rank + held, moved, rank + held)
        steps.append(Step(sent, received))
        held += moved
    return Plan(tuple(steps))


def bruck_reduce_scatter(rank: int, n: int, count: int) -> Plan:
    """Plan a reduce-scatter by recursive halving: the steps of the all-gather in reverse order.

    Half of the array is received at once, so scratch is half as long as the array.
    """
    return reverse(bruck_all_gather(rank, n, count), combine=True)


def all_to_all(rank: int, n: int, count: int) -> Plan:
    """Plan an all-to-all in n - 1 steps and a copy, with chunks of one size.

    Chunk q of the array of rank p becomes chunk p of the array of rank q.
    """
    chunks = chunk_bounds(count, n)
    return Plan(
        tuple(
            Step((Transfer(to, *chunks[to]),), (Transfer(source, *chunks[source]),))
            for to, source in _by_distance(rank, n)
        )
    )


def all_to_all_of(rank: int, sent: Sequence[int], received: Sequence[int]) -> Plan:
    """Plan an all-to-all of unequal counts in n - 1 steps and a copy (as MPI_Alltoallv).

    A part without elements is no message. A long part delays no other: DEPTH steps are in flight.

    sent, received  the elements that this rank sends to each rank, and receives from each. The parts
                    stand in the order of ranks, without gaps
    """

    def some(peer: int, start: int, stop: int) -> tuple[Transfer, ...]:
        return (Transfer(peer, start, stop),) if start < stop else ()

    outgoing, incoming = bounds(sent), bounds(received)
    return Plan(
        tuple(
            Step(some(to, *outgoing[to]), some(source, *incoming[source]))
            for to, source in _by_distance(rank, len(sent))
        ),
        DEPTH,
    )


def _by_distance(rank: int, n: int) -> list[tuple[int, int]]:
    """Return the ranks to send to and to receive from in each step, first this rank itself."""
    return [((rank + step) % n, (rank - step) % n) for step in range(n)]


def all_to_all_at_once(rank: int, n: int, count: int) -> Plan:
    """Plan the same all-to-all with all messages in flight together, for short arrays."""
    return at_once(all_to_all(rank, n, count))


def barrier(rank: int, n: int) -> Plan:
    """Plan a dissemination barrier: ceil(lg n) steps of empty messages.

    A rank that has finished depends on a message from every other rank, directly or not.

    source   Hensgen, Finkel & Manber 1988, Int. J. Parallel Program. 17(1)
    """
    distances = [1 << bit for bit in range((n - 1).bit_length())]
    return Plan(
        tuple(
            Step((Transfer((rank + d) % n, 0, 0),), (Transfer((rank - d) % n, 0, 0),))
            for d in distances
        )
    )


def ping_pong(rank: int, n: int, count: int) -> Plan:
    """Plan a ping-pong: rank 0 sends the array to the last rank, which sends it back."""
    last = n - 1
    whole = (Transfer(last - rank, 0, count),)
    if n == 1 or rank not in (0, last):
        return Plan(())
    there, back = Step(sends=whole), Step(receives=whole)
    return Plan((there, back) if rank == 0 else (back, there))


# Recursive halving and doubling: the distance between partners halves or doubles in every step.
# Partners of 8 ranks, and the elements that each rank sends in a step of an all-reduce:
#
#     recursive doubling        step 1   0-1  2-3  4-5  6-7    count
#                               step 2   0-2  1-3  4-6  5-7    count
#                               step 3   0-4  1-5  2-6  3-7    count
#
#     halving, reduce-scatter   step 1   0-4  1-5  2-6  3-7    count / 2
#                               step 2   0-2  1-3  4-6  5-7    count / 4
#                               step 3   0-1  2-3  4-5  6-7    count / 8
#     doubling, all-gather      step 4   0-1  2-3  4-5  6-7    count / 8
#                               step 5   0-2  1-3  4-6  5-7    count / 4
#                               step 6   0-4  1-5  2-6  3-7    count / 2
#
# Both need a power of two. For n = n' + r ranks, n' is the largest power of two. Of the first 2 r
# ranks, each even rank first sends its array to the odd rank after it, which adds it to its own,
# and returns the result at the end. With 6 ranks:
#
#     fold      0 -> 1   2 -> 3
#     plan      for n' = 4 ranks, on ranks 1, 3, 4, 5
#     return    1 -> 0   3 -> 2
#
# source   Thakur, Rabenseifner & Gropp 2005, Int. J. High Perform. Comput. Appl. 19(1)


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
    """Return a plan for any number of ranks from `plan`, which needs a power of two."""
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
