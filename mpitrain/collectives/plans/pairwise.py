"""Pairwise exchanges: in step s every rank sends to the rank s further on, so no two messages share a link.

Chunks go straight from where they are to where they belong. Nothing is passed on, so nothing is rounded twice when the
messages are compressed.
"""

from mpitrain.collectives.plans.steps import Plan, Step, Transfer, at_once, chunk_bounds


def reduce_scatter(rank: int, n: int, count: int) -> Plan:
    """n - 1 steps; chunk r is summed on rank r alone, its own part first, then from rank r - 1 downwards."""
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
    """n - 1 steps; chunk r goes from rank r to each of the others."""
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
    """Chunk q of rank p's array becomes chunk p of rank q's: n - 1 steps and a copy. Chunks are of one size."""
    chunks = chunk_bounds(count, n)
    ahead, behind = ([(rank + sign * step) % n for step in range(n)] for sign in (1, -1))
    return Plan(
        tuple(
            Step((Transfer(to, *chunks[to]),), (Transfer(source, *chunks[source]),))
            for to, source in zip(ahead, behind, strict=True)
        )
    )


def all_to_all_at_once(rank: int, n: int, count: int) -> Plan:
    """The same messages, all under way together: for short arrays."""
    return at_once(all_to_all(rank, n, count))


def barrier(rank: int, n: int) -> Plan:
    """ceil(lg n) steps of empty messages, after which every rank has heard of all. Dissemination barrier."""
    distances = [1 << bit for bit in range((n - 1).bit_length())]
    return Plan(
        tuple(
            Step((Transfer((rank + d) % n, 0, 0),), (Transfer((rank - d) % n, 0, 0),))
            for d in distances
        )
    )


def ping_pong(rank: int, n: int, count: int) -> Plan:
    """Rank 0 sends the array to the last rank and gets it back; the others rest, and a single rank too."""
    last = n - 1
    whole = (Transfer(last - rank, 0, count),)
    if n == 1 or rank not in (0, last):
        return Plan(())
    there, back = Step(sends=whole), Step(receives=whole)
    return Plan((there, back) if rank == 0 else (back, there))
