"""An all-reduce as text: who sends which chunk to whom, step by step, and how much that is."""

import textwrap
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.collectives.algorithms import ALL_REDUCE
from mpitrain.collectives.check import check_name
from mpitrain.collectives.plans import Plan, Step
from mpitrain.errors import ConfigError

ITEM = 4
"""Bytes of an element."""


class Move(NamedTuple):
    """Elements start to stop that travel between two ranks; `combine`: the target reduces them into its own."""

    source: int
    target: int
    start: int
    stop: int
    combine: bool


def all_reduce_plans(algorithm: str, hosts: Sequence[str], count: int) -> list[tuple[Plan, ...]]:
    """What each rank runs, one plan after the other; ConfigError for an algorithm that is not there, or that is no plan."""
    known = [name for name, line in ALL_REDUCE.items() if line.plans]
    check_name("allreduce algorithm", algorithm, tuple(ALL_REDUCE))
    plans = ALL_REDUCE[algorithm].plans
    if plans is None:
        raise ConfigError(f"Algorithm {algorithm} is no plan of messages that could be printed.", f"Take {', '.join(known)}.")
    return [plans(rank, hosts, count) for rank in range(len(hosts))]


def rounds(plans: Sequence[Sequence[Plan]]) -> list[list[Move]]:
    """The messages of all ranks by steps: each goes as soon as both its ends have come to it.

    plans  of each rank, which run one after the other, a step at a time
    """
    waiting = [deque(step for plan in mine for step in plan.steps if step.sends or step.receives) for mine in plans]
    listed = []
    while any(waiting):
        moves = [Move(rank, t.peer, t.start, t.stop, theirs[0].combine) for rank, mine in enumerate(waiting) if mine
                 for t in mine[0].sends if (theirs := waiting[t.peer]) and any(r.peer == rank for r in theirs[0].receives)]
        assert moves  # plans do not deadlock
        listed.append(moves)
        for rank, mine in enumerate(waiting):
            if mine:
                targets, sources = ({getattr(m, far) for m in moves if getattr(m, near) == rank}
                                    for near, far in (("source", "target"), ("target", "source")))
                left = Step(tuple(t for t in mine[0].sends if t.peer not in targets),
                            tuple(t for t in mine[0].receives if t.peer not in sources), mine[0].combine)
                mine.popleft()
                if left.sends or left.receives:
                    mine.appendleft(left)
    return listed


def printed(algorithm: str, hosts: Sequence[str], width: int) -> list[str]:
    """Every step of an all-reduce in lines of at most `width` columns, chunks numbered as the algorithm cuts the array."""
    n = len(hosts)
    count = n << n.bit_length()  # enough for chunks of one size, and too short for segments
    steps = rounds(all_reduce_plans(algorithm, hosts, count))
    bounds = sorted({0, count} | {bound for moves in steps for move in moves for bound in (move.start, move.stop)})
    chunks = {bound: chunk for chunk, bound in enumerate(bounds)}

    def named(move: Move) -> str:
        first, last = chunks[move.start], chunks[move.stop] - 1
        if (move.start, move.stop) == (0, count):
            return "all"
        return f"{first}-{last}" if last > first else f"{first}"

    lines = [f"{algorithm} all-reduce on {n} rank(s), the array in {len(bounds) - 1} chunk(s): {len(steps)} step(s)", ""]
    for number, moves in enumerate(steps):
        text = "   ".join(f"{m.source}>{m.target}\N{NO-BREAK SPACE}{'+' if m.combine else '='}{named(m)}" for m in moves)
        lines += textwrap.wrap(text, width, initial_indent=f"step {number + 1:<3} ", subsequent_indent=" " * 9)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def amounts(algorithm: str, hosts: Sequence[str], nbytes: int) -> list[str]:
    """What each rank sends of a float32 array of so many bytes, in words; segments of long arrays are messages of their own."""
    plans = all_reduce_plans(algorithm, hosts, nbytes // ITEM)
    sent = [[ITEM * (t.stop - t.start) for plan in mine for step in plan.steps for t in step.sends] for mine in plans]
    same: dict[tuple[int, int], list[int]] = {}
    for rank, messages in enumerate(sent):
        same.setdefault((sum(messages), len(messages)), []).append(rank)
    lines = [f"{'each of ranks' if ranks[1:] else 'rank'} {', '.join(map(str, ranks))}: {total} bytes in {messages} message(s)"
             for (total, messages), ranks in same.items()]
    return [*lines, f"all together: {sum(map(sum, sent))} bytes"]
