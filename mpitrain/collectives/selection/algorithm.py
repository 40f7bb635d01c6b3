"""What an algorithm is to the rest of the house: how it binds, where it runs, and what it costs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.collectives.engine.arithmetic import Arithmetic
from mpitrain.collectives.engine.compose import Chain
from mpitrain.collectives.engine.executor import Execution, Reduction
from mpitrain.collectives.plans.steps import Plan, segments
from mpitrain.collectives.plans.topology import Topology
from mpitrain.errors import MpitrainError
from mpitrain.transport.base import Transport


def anywhere(situation: Topology) -> None:
    """The refusal of an algorithm that refuses nothing."""


def always(situation: Topology) -> bool:
    """Of an algorithm that may be the fastest in every situation."""
    return True


def never(situation: Topology) -> bool:
    """Of an algorithm that others are compared with."""
    return False


def one_piece(hosts: Sequence[str], count: int) -> int:
    """Of plans without segments."""
    return 1


def chunks_in_segments(hosts: Sequence[str], count: int) -> int:
    """Of plans that cut the chunks of all ranks into segments."""
    return segments(len(hosts), count)


class Algorithm(NamedTuple):
    """An all-reduce, a reduce-scatter or an all-gather: a line of a table in algorithms.py.

    bind           (transport, array, op, tag, arithmetic) -> Reduction; None on every rank if this machine turns out to lack
                   what it takes, which nothing but binding tells. Collective
    plans          (rank, hosts, count) -> what a rank runs, one after the other, from which the cost follows; None: it is no
                   plan, and the cost of the all-reduce of that name is measured whole
    refusal        (situation) -> why it cannot run there, in words that begin with "algorithm"; None if it can
    is_rival       (situation) -> whether `auto` considers it there, if it can run
    segments       (hosts, count) -> how often the plan of a long array repeats that of a short one
    of_all_reduce  what it takes of the two measured constants of the all-reduce of that name, the time of an empty array and
                   the time of a byte, if it is no plan
    """

    bind: Callable[[Transport, np.ndarray, str, int, Arithmetic], Reduction | None]
    plans: Callable[[int, Sequence[str], int], tuple[Plan, ...]] | None = None
    refusal: Callable[[Topology], MpitrainError | None] = anywhere
    is_rival: Callable[[Topology], bool] = always
    segments: Callable[[Sequence[str], int], int] = one_piece
    of_all_reduce: tuple[float, float] = (1.0, 1.0)


def of_plans(
    plans: Callable[[int, Sequence[str], int], tuple[Plan, ...]],
    is_rival: Callable[[Topology], bool] = always,
    segments: Callable[[Sequence[str], int], int] = one_piece,
) -> Algorithm:
    """An algorithm that is plans, a function of (rank, hosts, count): it runs anywhere."""

    def bind(
        transport: Transport, array: np.ndarray, op: str, tag: int, arithmetic: Arithmetic
    ) -> Reduction:
        links = [
            Execution(transport, array, op, plan, tag, arithmetic=arithmetic)
            for plan in plans(transport.rank, transport.hosts, array.size)
        ]
        return links[0] if len(links) == 1 else Chain(transport, links)

    return Algorithm(bind, plans, is_rival=is_rival, segments=segments)


def of_plan(
    plan: Callable[[int, int, int], Plan],
    is_rival: Callable[[Topology], bool] = always,
    segments: Callable[[Sequence[str], int], int] = one_piece,
) -> Algorithm:
    """An algorithm that is one plan, a function of (rank, n, count), wherever the ranks are."""
    return of_plans(lambda rank, hosts, count: (plan(rank, len(hosts), count),), is_rival, segments)
