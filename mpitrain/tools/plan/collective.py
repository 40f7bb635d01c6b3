"""A collective, step by step: its messages, and after each step the ranks that contributed to each chunk."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from mpitrain.collectives.engine.executor import check_name
from mpitrain.collectives.plans.steps import Plan, Step
from mpitrain.collectives.selection.algorithm import shown
from mpitrain.collectives.selection.own_algorithm import proven
from mpitrain.collectives.selection.table import TABLES, title
from mpitrain.errors import ConfigError
from mpitrain.tools.plan import several

Held = list[list[int]]
"""Contents of chunks: bit q of `held[rank][chunk]` is set if it includes the data of rank q."""


class Move(NamedTuple):
    """A message of the elements start to stop - 1 from one rank to another.

    combine  whether the target reduces the elements into its own; otherwise they replace its own
    """

    source: int
    target: int
    start: int
    stop: int
    combine: bool


def plans_of(
    operation: str, algorithm: str, hosts: Sequence[str], count: int
) -> list[tuple[Plan, ...]]:
    """Return each rank's plans (lists of messages), which run one after the other.

    raises  ConfigError for an unknown algorithm, and for one that is not a plan of messages
    """
    table = TABLES[operation]
    known = [name for name, line in table.items() if line.plans]
    if algorithm not in table:
        check_name(f"{operation} algorithm", algorithm, known)
    if table[algorithm].plans is None:
        raise ConfigError(
            f"Algorithm {algorithm} is no plan of messages that could be printed.",
            f"Take {', '.join(known)}.",
        )
    return proven(operation, algorithm, hosts, count)


def rounds(plans: Sequence[Sequence[Plan]]) -> list[list[Move]]:
    """Return the messages of all ranks, in steps. A message is sent once both of its ranks reach it.

    plans  by rank: its plans, which it runs one after the other, a step at a time
    """
    waiting = [
        deque(step for plan in rank_plans for step in plan.steps if step.sends or step.receives)
        for rank_plans in plans
    ]
    listed = []
    while any(waiting):
        moves = [
            Move(rank, t.peer, t.start, t.stop, peer_steps[0].combine)
            for rank, steps in enumerate(waiting)
            if steps
            for t in steps[0].sends
            if (peer_steps := waiting[t.peer])
            and any(r.peer == rank for r in peer_steps[0].receives)
        ]
        assert moves  # Plans do not deadlock.
        listed.append(moves)
        targets: dict[int, set[int]] = {}
        sources: dict[int, set[int]] = {}
        for move in moves:
            targets.setdefault(move.source, set()).add(move.target)
            sources.setdefault(move.target, set()).add(move.source)
        for rank in {*targets, *sources}:
            steps, to, of = waiting[rank], targets.get(rank, set()), sources.get(rank, set())
            step = steps.popleft()
            left = Step(
                tuple(t for t in step.sends if t.peer not in to),
                tuple(t for t in step.receives if t.peer not in of),
                step.combine,
            )
            if left.sends or left.receives:
                steps.appendleft(left)
    return listed


class ChunkMessage(NamedTuple):
    """A message of the chunks first to last - 1 from one rank to another.

    combine  whether the target adds the chunks to its own; otherwise they replace its own
    """

    source: int
    target: int
    first: int
    last: int
    combine: bool


class Collective(NamedTuple):
    """The messages of a collective on all ranks.

    elements  number of elements of the array
    bounds    (start, stop) of each chunk, in elements
    steps     by step: its messages, which are sent at the same time
    """

    operation: str
    algorithm: str
    hosts: tuple[str, ...]
    elements: int
    bounds: tuple[tuple[int, int], ...]
    steps: tuple[tuple[ChunkMessage, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    @property
    def title(self) -> str:
        hosts = len({*self.hosts})
        where = f" on {several(hosts, 'host')}" if hosts > 1 else ""
        return f"{shown(self.algorithm)} {title(self.operation)} on {several(self.ranks, 'rank')}{where}"


def collective(operation: str, algorithm: str, hosts: Sequence[str]) -> Collective:
    """Return the messages of a collective.

    The array has chunks of one size, and is too short to be cut into segments.

    operation  a key of TABLES, such as allreduce
    hosts      host of every rank, by rank
    """
    # This length gives chunks of one size and is too short for segments.
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
                ChunkMessage(m.source, m.target, chunk[m.start], chunk[m.stop], m.combine)
                for m in moves
            )
            for moves in steps
        ),
    )


def contents(collective: Collective) -> Iterator[Held]:
    """Yield what every rank holds of each chunk, before the first step and after each step.

    A set of ranks that contributed to a chunk is an integer with bit r for rank r. All yields are
    the same list, by rank and chunk, which changes from step to step.
    """
    held = [
        [
            1 << rank if collective.operation != "all-gather" or rank == chunk else 0
            for chunk in range(len(collective.bounds))
        ]
        for rank in range(collective.ranks)
    ]
    yield held
    for messages in collective.steps:
        # All messages of a step leave before any of them arrives.
        sent = [held[m.source][m.first : m.last] for m in messages]
        for m, arriving in zip(messages, sent, strict=True):
            for chunk, data in enumerate(arriving, m.first):
                held[m.target][chunk] = data | (held[m.target][chunk] if m.combine else 0)
        yield held


def complete(collective: Collective) -> list[int]:
    """Return what a rank holds of each chunk at the end: data of all ranks, or of one in an
    all-gather.
    """
    return [
        1 << chunk if collective.operation == "all-gather" else (1 << collective.ranks) - 1
        for chunk in range(len(collective.bounds))
    ]


class HalvesBoundary(NamedTuple):
    step: int
    first: str
    second: str


def meeting(collective: Collective) -> HalvesBoundary | None:
    """Return the step after which an all-reduce only copies, with names of the halves; None without
    one.
    """
    adding = [
        number
        for number, messages in enumerate(collective.steps, 1)
        if any(m.combine for m in messages)
    ]
    if collective.operation != "allreduce" or not adding or adding[-1] == len(collective.steps):
        return None
    whole = complete(collective)
    held = next(each for number, each in enumerate(contents(collective)) if number == adding[-1])
    owners = [rank for rank, chunks in enumerate(held) if chunks == whole]
    if not owners:
        return HalvesBoundary(adding[-1], "reduce-scatter", "all-gather")
    if len(owners) == 1:
        return HalvesBoundary(
            adding[-1], f"reduce to rank {owners[0]}", f"broadcast from rank {owners[0]}"
        )
    return HalvesBoundary(adding[-1], "sum on the active ranks", "copy to the others")


def listed(ranks: Iterable[int], between: str) -> str:
    """Return ascending numbers as text; three or more consecutive ones become first-last.

    between  separator between two entries
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return between.join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else between.join(map(str, run)) for run in runs
    )


def data_of(data: int) -> str:
    """Return the ranks in a set that `contents` yields as text: 0+2, 0-3, or - for none."""
    return listed((rank for rank in range(data.bit_length()) if data >> rank & 1), "+") or "-"
