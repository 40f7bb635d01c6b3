"""Algorithm: the descriptor of one algorithm, made from its plans; and names of algorithms in files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpitrain.collectives.engine.arithmetic import Arithmetic
from mpitrain.collectives.engine.compose import Chain
from mpitrain.collectives.engine.executor import Agreed, Execution, Reduction
from mpitrain.collectives.plans.steps import Plan, segments
from mpitrain.config.plugins import MARK
from mpitrain.errors import MpitrainError
from mpitrain.transport.base import Transport


class Topology(NamedTuple):
    """Hosts of the ranks and type of their arrays: the properties that algorithms depend on.

    hosts         host name of every rank
    dtype         name of the elements' NumPy dtype
    is_native     whether MPI reduces the dtype
    is_on_device  whether the arrays are in GPU memory
    """

    hosts: Sequence[str]
    dtype: str = "float32"
    is_native: bool = True
    is_on_device: bool = False


def always(topology: Topology) -> bool:
    return True


def never(topology: Topology) -> bool:
    return False


def one_piece(hosts: Sequence[str], count: int) -> int:
    return 1


def chunks_in_segments(hosts: Sequence[str], count: int) -> int:
    """Return the number of segments of each chunk, for plans that pipeline all chunks."""
    return segments(len(hosts), count)


class Algorithm(NamedTuple):
    """Descriptor of an all-reduce, a reduce-scatter or an all-gather; a row of table.py.

    bind           (transport, array, op, agreed, arithmetic) -> Reduction; collective. It returns
                   None, on every rank, if this machine turns out not to support the algorithm. The
                   `bind` of a plugin never returns None
    plans          (rank, hosts, count) -> plans that a rank runs one after the other. The cost model
                   reads them. None: the algorithm has no plan, and is measured as a whole
    refusal        (topology) -> error that explains why it cannot run there, or None
    is_rival       (topology) -> whether "auto" considers it there, if it can run; `never`: it is only a
                   baseline for comparisons
    segments       (hosts, count) -> number of segments of the array; the plan repeats the steps of a
                   short array for each
    of_all_reduce  for an algorithm without a plan: its fractions of the two constants that are
                   measured for the all-reduce of the same name (the time of an empty array, and the
                   time per byte)
    """

    bind: Callable[[Transport, np.ndarray, str, Agreed, Arithmetic], Reduction | None]
    plans: Callable[[int, Sequence[str], int], tuple[Plan, ...]] | None = None
    refusal: Callable[[Topology], MpitrainError | None] = lambda topology: None
    is_rival: Callable[[Topology], bool] = always
    segments: Callable[[Sequence[str], int], int] = one_piece
    of_all_reduce: tuple[float, float] = (1.0, 1.0)


def of_plans(
    plans: Callable[[int, Sequence[str], int], tuple[Plan, ...]],
    is_rival: Callable[[Topology], bool] = always,
    segments: Callable[[Sequence[str], int], int] = one_piece,
) -> Algorithm:
    """Return the descriptor of an algorithm that runs plans, functions of (rank, hosts, count).

    It supports every topology.
    """

    def bind(
        transport: Transport, array: np.ndarray, op: str, agreed: Agreed, arithmetic: Arithmetic
    ) -> Reduction:
        links = [
            Execution(transport, array, op, plan, agreed.tag, combining=arithmetic.combining)
            for plan in plans(transport.rank, transport.hosts, array.size)
        ]
        return links[0] if len(links) == 1 else Chain(links)

    return Algorithm(bind, plans, is_rival=is_rival, segments=segments)


def of_plan(
    plan: Callable[[int, int, int], Plan],
    is_rival: Callable[[Topology], bool] = always,
    segments: Callable[[Sequence[str], int], int] = one_piece,
) -> Algorithm:
    """Return the descriptor of an algorithm that runs one plan, a function of (rank, n, count)."""
    return of_plans(lambda rank, hosts, count: (plan(rank, len(hosts), count),), is_rival, segments)


SUFFIX = ".py"


def is_file(name: str) -> bool:
    """Return whether an algorithm is spelled as a file: FILE.py, or that and its digest."""
    return name.partition(MARK)[0].endswith(SUFFIX)


def shown(name: str) -> str:
    """Return an algorithm's name for people: the file without its folder and digest."""
    return Path(name.partition(MARK)[0]).name if is_file(name) else name
