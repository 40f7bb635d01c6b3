"""Exercises whose answers are messages as data: a ring backwards, and unequal parameter servers."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from mpitrain.collectives.plans.checked import Step, Transfer, simulate, steps_of
from mpitrain.collectives.plans.own_file import Wrong
from mpitrain.tools.textbook.exercises.exercise import AnswerCost, Case, Exercise, check_cost

MOST_STEPS = 100

RING_STATEMENT = """An all-reduce on a ring that turns the other way.

Each rank sends only to rank - 1 and receives only from rank + 1, modulo ranks.
The chunks are unequal: of count elements, each of the ranks' chunks has count // ranks,
and each of the first count % ranks chunks has one more.
A message is one whole chunk. Afterwards every rank has the sum of all ranks' arrays.

Return the list of steps of this rank. A step is (sends, receives, adds): two lists of
(peer, start, stop), and whether received elements are added (True) or replace (False)."""

SERVER_STATEMENT = """Parameter servers of unequal size, as messages.

Ranks 0 to servers - 1 are servers, the next `workers` ranks are workers.
Server k stores the elements from cut(k) to cut(k + 1) of count elements, where
cut(k) = count * k * (k + 1) // (servers * (servers + 1)): server k has a share of k + 1.
Each worker sends every server its share of the gradient. A server adds the gradients
and sends each worker the sum. Servers have no gradient; workers send nothing to workers.
Afterwards every worker has the sum of all workers' arrays.

Return the list of steps of this rank. A step is (sends, receives, adds): two lists of
(peer, start, stop), and whether received elements are added (True) or replace (False)."""

STEPS_BODY = """    steps = []
    # steps.append((sends, receives, adds))
    raise NotImplementedError
"""


TO_ANOTHER = "rank {rank} sends to rank {other}, and must do so with rank {peer} alone"
FROM_ANOTHER = "rank {rank} receives from rank {other}, and must do so with rank {peer} alone"


def chunks(ranks: int, count: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each chunk: the first count % ranks chunks are longer."""
    size, longer = divmod(count, ranks)
    starts = [c * size + min(c, longer) for c in range(ranks + 1)]
    return [*pairwise(starts)]


def sent(steps: Sequence[Step]) -> int:
    """Return the elements that a rank sends."""
    return sum(stop - start for sends, _, _ in steps for _, start, stop in sends)


def calls(case: Case) -> list[list[Any]]:
    *before, _ = case
    return [[rank, *case] for rank in range(sum(before))]


def judge_ring(case: Case, answer: Any) -> AnswerCost:
    """Check the backward ring: sums, neighbours, chunks and bytes."""
    ranks, count = case
    steps = [
        steps_of(result, rank, ranks, count, f"backward_ring({rank}, {ranks}, {count})", MOST_STEPS)
        for rank, result in enumerate(answer["results"])
    ]
    bounds = chunks(ranks, count)
    for rank, steps_of_rank in enumerate(steps):
        for sends, receives, _ in steps_of_rank:
            _check_peers(sends, rank, (rank - 1) % ranks, TO_ANOTHER)
            _check_peers(receives, rank, (rank + 1) % ranks, FROM_ANOTHER)
            for _, start, stop in (*sends, *receives):
                if (start, stop) not in bounds:
                    raise Wrong(
                        "a message of rank {rank} has elements {start} to {stop}, which are no chunk",
                        rank=rank,
                        start=start,
                        stop=stop,
                    )
    simulate(steps, count)
    sizes = [stop - start for start, stop in bounds]
    # A rank never sends the chunk that it sums last, nor the chunk that its receiver sums last.
    most = 2 * count - min(sizes[rank] + sizes[rank - 1] for rank in range(ranks))
    return check_cost(AnswerCost(max(map(sent, steps)), most), "elements sent by the busiest rank")


def _check_peers(transfers: Sequence[Transfer], rank: int, peer: int, law: str) -> None:
    """Raise Wrong by this law if a transfer has another peer."""
    for other, _, _ in transfers:
        if other != peer:
            raise Wrong(law, rank=rank, other=other, peer=peer)


def judge_server(case: Case, answer: Any) -> AnswerCost:
    """Check the servers: sums, who sends to whom, shares and bytes."""
    workers, servers, count = case
    ranks = workers + servers
    steps = [
        steps_of(
            result,
            rank,
            ranks,
            count,
            f"parameter_server({rank}, {workers}, {servers}, {count})",
            MOST_STEPS,
        )
        for rank, result in enumerate(answer["results"])
    ]
    cuts = [count * k * (k + 1) // (servers * (servers + 1)) for k in range(servers + 1)]
    for rank, steps_of_rank in enumerate(steps):
        for peer, start, stop in (
            transfer for step in steps_of_rank for transfers in step[:2] for transfer in transfers
        ):
            if (rank < servers) == (peer < servers):
                raise Wrong(
                    "rank {rank} exchanges with rank {peer}, but only a worker and a server may",
                    rank=rank,
                    peer=peer,
                )
            server = min(rank, peer)
            if not cuts[server] <= start <= stop <= cuts[server + 1]:
                raise Wrong(
                    "elements {start} to {stop} go through server {server}, which stores {first} "
                    "to {last}",
                    start=start,
                    stop=stop,
                    server=server,
                    first=cuts[server],
                    last=cuts[server + 1],
                )
    simulate(steps, count, range(servers, ranks))
    share = max(stop - start for start, stop in pairwise(cuts))
    return check_cost(
        AnswerCost(max(map(sent, steps)), max(count, workers * share)),
        "elements sent by the busiest rank",
    )


EXERCISES = {
    "ring": Exercise(
        "backward_ring",
        ("ranks", "count"),
        "rank, ranks, count",
        RING_STATEMENT,
        STEPS_BODY,
        ((1, 0), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 3), (3, 5), (4, 7), (5, 23), (7, 24)),
        calls=lambda case: [[rank, *case] for rank in range(case[0])],
        way="values",
        judge=judge_ring,
        cost="elements sent by the busiest rank",
        formula="2 count - the two smallest neighbouring chunks",
    ),
    "server": Exercise(
        "parameter_server",
        ("workers", "servers", "count"),
        "rank, workers, servers, count",
        SERVER_STATEMENT,
        STEPS_BODY,
        ((1, 1, 0), (1, 1, 1), (2, 1, 1), (1, 2, 3), (2, 2, 3), (3, 2, 7), (2, 3, 12), (4, 3, 25)),
        calls=calls,
        way="values",
        judge=judge_server,
        cost="elements sent by the busiest rank",
        formula="max(count, workers x largest share)",
    ),
}
