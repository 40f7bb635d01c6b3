"""Binding: where the ranks agree on what a collective will do, and on nothing again afterwards.

Every function here is collective: all ranks call it, in the same order. Each bound collective has a tag of its own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.collectives import binomial, ring, star
from mpitrain.collectives.execute import OPS, Execution, Reduction
from mpitrain.collectives.native import Native
from mpitrain.collectives.plans import Plan
from mpitrain.errors import CommError, ConfigError, MpitrainError
from mpitrain.transport.base import Transport

ALL_REDUCE: dict[str, Callable[[int, int, int], Plan]] = {"ring": ring.all_reduce, "star": star.all_reduce}
"""All-reduce algorithms that are plans: functions of (rank, n, count)."""

ALGORITHMS = (*ALL_REDUCE, "native")
"""What `bind` accepts."""


def bind(transport: Transport, array: np.ndarray, op: str = "add", algorithm: str = "ring") -> Reduction:
    """Bind an all-reduce of `array`, in place, over all ranks of the transport.

    array    contiguous, any shape; one count and dtype on all ranks
    op       "add" or "maximum"
    raises   CommError on every rank, here and not in a run, if ranks differ; ConfigError for an unknown name
    """
    tag = agree(transport, "all-reduce", array, op=op, algorithm=algorithm)
    check_name("algorithm", algorithm, ALGORITHMS)
    if algorithm == "native":
        return Native(transport, array, op)
    return Execution(transport, array, op, ALL_REDUCE[algorithm](transport.rank, transport.size, array.size), tag)


def bind_reduce_scatter(transport: Transport, array: np.ndarray, op: str = "add") -> Reduction:
    """Bind a ring reduce-scatter: chunk r (plans.chunk_bounds) ends as the reduction on rank r, the rest as scratch."""
    tag = agree(transport, "reduce-scatter", array, op=op)
    return Execution(transport, array, op, ring.reduce_scatter(transport.rank, transport.size, array.size), tag)


def bind_all_gather(transport: Transport, array: np.ndarray) -> Reduction:
    """Bind a ring all-gather: chunk r of rank r ends in everyone's array."""
    tag = agree(transport, "all-gather", array)
    return Execution(transport, array, "add", ring.all_gather(transport.rank, transport.size, array.size), tag)


def bind_broadcast(transport: Transport, array: np.ndarray, root: int = 0) -> Reduction:
    """Bind a binomial broadcast of root's array to everyone's."""
    tag = agree(transport, "broadcast", array, root=root)
    if not 0 <= root < transport.size:
        raise everywhere(CommError(f"rank {transport.rank}: root {root} is not among ranks 0 to {transport.size - 1}."))
    return Execution(transport, array, "add", binomial.broadcast(transport.rank, transport.size, array.size, root), tag)


def agree(transport: Transport, operation: str, array: np.ndarray, **settings: Any) -> int:
    """Compare what the ranks are about to bind, and return the tag it gets.

    raises   CommError on every rank if anything differs, or if any rank's array is not one contiguous block;
             ConfigError for an unknown op
    """
    contiguous = bool(array.flags.c_contiguous) and not array.dtype.hasobject
    mine = {"operation": operation, "count": array.size, "dtype": array.dtype.name, **settings,
            "tag": transport.claim_tag(), "contiguous": contiguous}
    everyone = transport.gather_text(mine)
    for name in dict.fromkeys(name for facts in everyone for name in facts):
        values = [facts.get(name) for facts in everyone]
        if name == "contiguous" and not all(values):
            raise everywhere(CommError(
                f"rank {transport.rank}: {operation} needs contiguous arrays of plain numbers on every rank, but "
                f"rank {values.index(False)} passed another kind.",
                "Bind numpy.ascontiguousarray(array), or the buffer that the array is a view of."))
        if any(value != values[0] for value in values):
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise everywhere(CommError(
                f"rank {transport.rank}: {operation} needs one {name} on every rank, but it is {listed}.",
                "All ranks must bind the same collectives, on equal arrays, in the same order."))
    if "op" in settings:
        check_name("op", settings["op"], tuple(OPS))
    return mine["tag"]


def check_name(what: str, name: str, known: tuple[str, ...]) -> None:
    """ConfigError that lists what there is, unless the name is among it."""
    if name not in known:
        raise everywhere(ConfigError(f"{what} must be one of {', '.join(known)}, but it is {name!r}."))


def everywhere(error: MpitrainError) -> MpitrainError:
    """Mark an error that every rank raises, so that one may print it and all may leave together."""
    error.agreed = True
    return error
