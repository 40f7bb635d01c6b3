"""A collective step by step: who sends which chunk to whom, and whose data each rank then holds."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from mpitrain.collectives.engine.agreement import check_name
from mpitrain.collectives.plans.steps import Plan, Step
from mpitrain.collectives.selection.table import TABLES
from mpitrain.errors import ConfigError

Held = list[list[int]]
"""held[rank][chunk]: bit q is set if the data of rank q are in that chunk of that rank."""


class Move(NamedTuple):
    """Elements start to stop that travel between two ranks.

    combine  the target reduces them into its own
    """

    source: int
    target: int
    start: int
    stop: int
    combine: bool


def plans_of(
    operation: str, algorithm: str, hosts: Sequence[str], count: int
) -> list[tuple[Plan, ...]]:
    """What each rank runs, one plan after the other.

    raises  ConfigError for an algorithm that is not there, or that is no plan
    """
    table = TABLES[operation]
    known = [name for name, line in table.items() if line.plans]
    if algorithm not in table:
        check_name(f"{operation} algorithm", algorithm, known)
    plans = table[algorithm].plans
    if plans is None:
        raise ConfigError(
            f"Algorithm {algorithm} is no plan of messages that could be printed.",
            f"Take {', '.join(known)}.",
        )
    return [plans(rank, hosts, count) for rank in range(len(hosts))]


def rounds(plans: Sequence[Sequence[Plan]]) -> list[list[Move]]:
    """The messages of all ranks by steps: each goes as soon as both its ends have come to it.

    plans  of each rank, which run one after the other, a step at a time
    """
    waiting = [
        deque(step for plan in mine for step in plan.steps if step.sends or step.receives)
        for mine in plans
    ]
    listed = []
    while any(waiting):
        moves = [
            Move(rank, t.peer, t.start, t.stop, theirs[0].combine)
            for rank, mine in enumerate(waiting)
            if mine
            for t in mine[0].sends
            if (theirs := waiting[t.peer]) and any(r.peer == rank for r in theirs[0].receives)
        ]
        assert moves  # plans do not deadlock
        listed.append(moves)
        targets: dict[int, set[int]] = {}
        sources: dict[int, set[int]] = {}
        for move in moves:
            targets.setdefault(move.source, set()).add(move.target)
            sources.setdefault(move.target, set()).add(move.source)
        for rank in {*targets, *sources}:
            mine, to, of = waiting[rank], targets.get(rank, set()), sources.get(rank, set())
            left = Step(
                tuple(t for t in mine[0].sends if t.peer not in to),
                tuple(t for t in mine[0].receives if t.peer not in of),
                mine[0].combine,
            )
            mine.popleft()
            if left.sends or left.receives:
                mine.appendleft(left)
    return listed


class Message(NamedTuple):
    """Chunks first to last - 1 that travel between two ranks.

    combine  the target adds them to its own; otherwise they replace its own
    """

    source: int
    target: int
    first: int
    last: int
    combine: bool


class Collective(NamedTuple):
    """All messages of a collective, and the chunks that the algorithm cuts the array into.

    bounds  (start, stop) of each chunk, of an array of so many `elements`
    steps   the messages of each step, which travel together
    """

    operation: str
    algorithm: str
    hosts: tuple[str, ...]
    elements: int
    bounds: tuple[tuple[int, int], ...]
    steps: tuple[tuple[Message, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.hosts)


def collective(operation: str, algorithm: str, hosts: Sequence[str]) -> Collective:
    """The messages of an operation of TABLES on an array too short for segments."""
    # Enough elements for chunks of one size, too few for segments.
    count = len(hosts) << len(hosts).bit_length()
    steps = rounds(plans_of(operation, algorithm, hosts, count))
    cuts = sorted(
        {0, count} | {cut for moves in steps for move in moves for cut in (move.start, move.stop)}
    )
    chunk = {cut: number for number, cut in enumerate(cuts)}
    return Collective(
        operation,
        algorithm,
        tuple(hosts),
        count,
        tuple(pairwise(cuts)),
        tuple(
            tuple(
                Message(m.source, m.target, chunk[m.start], chunk[m.stop], m.combine) for m in moves
            )
            for moves in steps
        ),
    )


def contents(found: Collective) -> Iterator[Held]:
    """Whose data each rank holds at the start and after each step.

    It is one list, which changes from step to step.
    """
    held = [
        [
            1 << rank if found.operation != "all-gather" or rank == chunk else 0
            for chunk in range(len(found.bounds))
        ]
        for rank in range(found.ranks)
    ]
    yield held
    for messages in found.steps:
        sent = [held[m.source][m.first : m.last] for m in messages]  # all leave before any arrives
        for m, arriving in zip(messages, sent, strict=True):
            for chunk, data in enumerate(arriving, m.first):
                held[m.target][chunk] = data | (held[m.target][chunk] if m.combine else 0)
        yield held


def complete(found: Collective) -> list[int]:
    """What each chunk holds in the end: all ranks' data; of an all-gather, its own rank's."""
    return [
        1 << chunk if found.operation == "all-gather" else (1 << found.ranks) - 1
        for chunk in range(len(found.bounds))
    ]


class Meeting(NamedTuple):
    """The step after which an all-reduce adds nothing any more, and the names of its halves."""

    step: int
    first: str
    second: str


def meeting(found: Collective) -> Meeting | None:
    """Where an all-reduce stops adding and begins to copy; None if there is no such step."""
    adding = [
        number for number, messages in enumerate(found.steps, 1) if any(m.combine for m in messages)
    ]
    if found.operation != "allreduce" or not adding or adding[-1] == len(found.steps):
        return None
    whole = complete(found)
    held = next(each for number, each in enumerate(contents(found)) if number == adding[-1])
    owners = [rank for rank, mine in enumerate(held) if mine == whole]
    if not owners:
        return Meeting(adding[-1], "reduce-scatter", "all-gather")
    if len(owners) == 1:
        return Meeting(
            adding[-1], f"reduce to rank {owners[0]}", f"broadcast from rank {owners[0]}"
        )
    return Meeting(adding[-1], "sum on the active ranks", "copy to the others")
