"""The rules of an all-reduce that a user writes: the form of its steps, and their simulation.

A step is `(sends, receives, adds)`. The first two are lists of `(peer, start, stop)`. Nothing here
imports NumPy or MPI: the process that runs the user's file uses these rules.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from mpitrain.collectives.plans.isolated import Wrong

MOST_STEPS = 100_000

Transfer = tuple[int, int, int]
"""Peer, first element, and the element after the last."""
Step = tuple[list[Transfer], list[Transfer], bool]
"""Sends, receives, and whether received elements are added."""


def steps_of(
    answer: Any, rank: int, ranks: int, count: int, call: str = "", most: int = MOST_STEPS
) -> list[Step]:
    """Return the steps of a rank in the form of `Step`; Wrong if they are anything else.

    call  the call that returned the answer, for messages
    most  largest number of steps
    """
    where = call or f"all_reduce({rank}, {ranks}, {count})"
    if not isinstance(answer, list | tuple):
        raise Wrong(f"{where} must return a list of steps, but it is {answer!r:.60}")
    if len(answer) > most:
        raise Wrong(f"{where} has {len(answer):,} steps, more than {most:,}")
    found = []
    for number, step in enumerate(answer, 1):
        if not (isinstance(step, list | tuple) and len(step) == 3 and isinstance(step[2], bool)):
            raise Wrong(
                f"step {number} of {where} must be (sends, receives, adds), but it is {step!r:.60}"
            )
        sends, receives = (
            [_transfer(one, number, where, rank, ranks, count) for one in side]
            if isinstance(side, list | tuple)
            else _transfer(side, number, where, rank, ranks, count)
            for side in step[:2]
        )
        found.append((sends, receives, step[2]))
        _check_overlap(sends, receives, step[2], number, rank)  # type: ignore[arg-type]
    return found  # type: ignore[return-value]


def _transfer(one: Any, step: int, where: str, rank: int, ranks: int, count: int) -> Transfer:
    """Return a transfer as three numbers; Wrong if it is none, or none of this array."""
    if not (
        isinstance(one, list | tuple)
        and len(one) == 3
        and all(isinstance(number, int) and not isinstance(number, bool) for number in one)
    ):
        raise Wrong(
            f"step {step} of {where} must list (peer, start, stop) of integers, but has {one!r:.60}"
        )
    peer, start, stop = one
    if not 0 <= peer < ranks or peer == rank:
        raise Wrong(f"step {step} of {where} names peer {peer}, which is no other rank")
    if not 0 <= start <= stop <= count:
        raise Wrong(f"step {step} of {where} names elements {start} to {stop} of {count}")
    return peer, start, stop


def _check_overlap(
    sends: list[Transfer], receives: list[Transfer], adds: bool, step: int, rank: int
) -> None:
    """Raise Wrong if received elements replace others that the same step sends or receives."""
    ends = sorted((start, stop) for _, start, stop in receives if start < stop)
    for (_, stop), (start, _) in pairwise(ends):
        if start < stop and not adds:
            raise Wrong(f"step {step} of rank {rank} receives element {start} twice")
    if adds:
        return
    for _, start, stop in sends:
        for first, last in ends:
            if max(first, start) < min(last, stop):
                raise Wrong(
                    f"step {step} of rank {rank} sends element {max(first, start)} and replaces it"
                )


def simulate(
    plans: Sequence[Sequence[Step]], count: int, workers: Collection[int] | None = None
) -> None:
    """Run the plans on symbols; Wrong unless every rank ends with the same sum of all ranks.

    workers  the ranks that have summands and need the sum; others start with zeros. None: all

    A rank's step ends when all of its messages have been exchanged. Messages of a pair of ranks
    arrive in order. The order of summation must be the same on all ranks: otherwise their results
    differ by rounding. The order of two summands does not matter.
    """
    ranks = len(plans)
    cuts = sorted(
        {0, count}
        | {
            cut
            for mine in plans
            for sends, receives, _ in mine
            for _, *ends in (*sends, *receives)
            for cut in ends
        }
    )
    chunk = {cut: number for number, cut in enumerate(cuts)}
    sums: dict[Any, int] = {}
    ranks_of: list[dict[int, int]] = []

    def symbol(key: Any, summed: dict[int, int]) -> int:
        """Return the number of an expression; equal expressions have one number."""
        if key not in sums:
            sums[key] = len(ranks_of)
            ranks_of.append(summed)
        return sums[key]

    def add(x: int, y: int) -> int:
        if not (ranks_of[x] and ranks_of[y]):
            return x if ranks_of[x] else y
        key = (min(x, y), max(x, y))
        if key in sums:
            return sums[key]
        counts = dict(ranks_of[x])
        for rank, times in ranks_of[y].items():
            counts[rank] = counts.get(rank, 0) + times
        return symbol(key, counts)

    used = range(ranks) if workers is None else sorted(workers)
    zero = symbol("zero", {})
    held = [
        [symbol(rank, {rank: 1}) if rank in used else zero] * (len(cuts) - 1)
        for rank in range(ranks)
    ]
    left = [deque(mine) for mine in plans]
    waiting: list[tuple[deque, list, list[list[int]]] | None] = [None] * ranks
    arrived: list[list[tuple[int, Transfer, list[int]]]] = [[] for _ in range(ranks)]

    def begin(rank: int) -> None:
        """Start the next step that has messages: its sends take the elements of now."""
        while left[rank]:
            sends, receives, _ = left[rank][0]
            if sends or receives:
                data = [held[rank][chunk[start] : chunk[stop]] for _, start, stop in sends]
                waiting[rank] = (
                    deque(zip(sends, data, strict=True)),
                    list(enumerate(receives)),
                    [],
                )
                return
            left[rank].popleft()
        waiting[rank] = None

    for rank in range(ranks):
        begin(rank)
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            mine = waiting[rank]
            if mine is None:
                continue
            rest: deque = deque()
            blocked: set[int] = set()
            for (peer, start, stop), data in mine[0]:
                theirs = waiting[peer]
                match = theirs and next((r for r in theirs[1] if r[1][0] == rank), None)
                if peer in blocked or not match or theirs is None:
                    blocked.add(peer)
                    rest.append(((peer, start, stop), data))
                    continue
                number, (_, first, last) = match
                if last - first != stop - start:
                    raise Wrong(
                        f"rank {rank} sends {stop - start} elements to rank {peer}, which receives "
                        f"{last - first} in their place"
                    )
                theirs[1].remove(match)
                arrived[peer].append((number, match[1], data))
                moved = True
            waiting[rank] = (rest, mine[1], mine[2])
        for rank in range(ranks):
            mine = waiting[rank]
            if mine is not None and not mine[0] and not mine[1]:
                adds = left[rank].popleft()[2]
                for _, (_, start, stop), data in sorted(arrived[rank], key=lambda one: one[0]):
                    first, last = chunk[start], chunk[stop]
                    held[rank][first:last] = (
                        [*map(add, held[rank][first:last], data)] if adds else data
                    )
                arrived[rank] = []
                begin(rank)
                moved = True
    if any(waiting):
        raise Wrong(f"no message can move: {_waits(waiting, plans, left)}")
    for number, (start, _) in enumerate(pairwise(cuts)):
        for rank in used:
            summed = ranks_of[held[rank][number]]
            for other in used:
                if (times := summed.get(other, 0)) != 1:
                    raise Wrong(
                        f"element {start} of rank {rank} has the value of rank {other} {times} "
                        "times, and must have it once"
                    )
            if held[rank][number] != held[used[0]][number]:
                raise Wrong(
                    f"ranks {used[0]} and {rank} sum element {start} in another order, so their results "
                    "differ by rounding"
                )


def _waits(waiting: Sequence[Any], plans: Sequence[Any], left: Sequence[Any]) -> str:
    """Return the first message that each rank waits for."""
    said = []
    for rank, mine in enumerate(waiting):
        if mine is not None:
            to = [f"to send to rank {peer}" for (peer, *_), _ in mine[0]]
            of = [f"to receive from rank {peer}" for _, (peer, *_) in mine[1]]
            step = len(plans[rank]) - len(left[rank]) + 1
            said.append(f"rank {rank} waits in step {step} {(to + of)[0]}")
    return ", ".join(said[:4])


def all_reduce(names: Mapping[str, Any], ranks: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield the proven plans of all ranks, of the function `all_reduce` of a user's file.

    names   the file's own, by name
    raises  Wrong if the plans break a rule
    """
    plan: Callable[..., Any] | None = names.get("all_reduce")
    if not callable(plan):
        raise Wrong("the file must define all_reduce(rank, ranks, count)")
    plans = [steps_of(plan(rank, ranks, count), rank, ranks, count) for rank in range(ranks)]
    simulate(plans, count)
    yield {"plans": plans}
