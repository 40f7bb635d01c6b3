"""Pairwise exchanges: in step s, rank r sends to rank r + s. No two messages share a link.

Each chunk goes straight from its source to its destination. No rank forwards a chunk, so
compressed messages are rounded only once.
"""

from mpitrain.collectives.plans.steps import Plan, Step, Transfer, at_once, chunk_bounds


def reduce_scatter(rank: int, n: int, count: int) -> Plan:
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


def all_gather(rank: int, n: int, count: int) -> Plan:
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


def all_to_all(rank: int, n: int, count: int) -> Plan:
    """Plan an all-to-all in n - 1 steps and a copy, with chunks of one size.

    Chunk q of the array of rank p becomes chunk p of the array of rank q.
    """
    chunks = chunk_bounds(count, n)
    ahead, behind = ([(rank + sign * step) % n for step in range(n)] for sign in (1, -1))
    return Plan(
        tuple(
            Step((Transfer(to, *chunks[to]),), (Transfer(source, *chunks[source]),))
            for to, source in zip(ahead, behind, strict=True)
        )
    )


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
    """Plan a ping-pong: rank 0 sends the array to the last rank, which sends it back.

    All other ranks are idle; a single rank is idle too.
    """
    last = n - 1
    whole = (Transfer(last - rank, 0, count),)
    if n == 1 or rank not in (0, last):
        return Plan(())
    there, back = Step(sends=whole), Step(receives=whole)
    return Plan((there, back) if rank == 0 else (back, there))
