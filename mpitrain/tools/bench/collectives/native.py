"""MPI's own collectives as peers: bound to the same arrays, and checked and timed like ours."""

from collections.abc import Callable
from typing import Any, NamedTuple

from mpitrain.collectives.selection.algorithm import Topology
from mpitrain.collectives.selection.table import ALL_REDUCE, TABLES, choices
from mpitrain.errors import CommError, MpitrainError
from mpitrain.tools.bench.collectives.operations import (
    OPERATIONS,
    BenchedCollective,
    Buffers,
    ReductionOptions,
)
from mpitrain.transport.base import NATIVE_OPERATIONS as NATIVE
from mpitrain.transport.base import Transport

REDUCING = ("reduce", "reduce-scatter")
"""MPI's collectives that reduce, and so accept only dtypes that MPI can reduce."""


class Peer(NamedTuple):
    """A collective of the MPI library, bound to its arrays."""

    run: Callable[[], None]
    algorithm: str = "native"


def names(operation: str) -> tuple[str, ...]:
    """Return the names of all algorithms: ours, and "native" if MPI has the collective."""
    return (*choices(operation), "native") if operation in NATIVE else choices(operation)


def operation_of(operation: str, algorithm: str) -> BenchedCollective:
    """Return the benchmark operation; for "native", with the MPI library's collective as `bind`.

    MPI's reduce-scatter returns its result in the second array, so `is_in_other` is then True.
    """
    if operation not in NATIVE or algorithm != "native":
        return OPERATIONS[operation]

    def bind(transport: Transport, buffers: Buffers, way: ReductionOptions) -> Any:
        return Peer(transport.bind_native(operation, buffers.array, buffers.other))

    ours = OPERATIONS[operation]
    if operation != "reduce-scatter":
        return ours._replace(bind=bind)
    return ours._replace(bind=bind, other=lambda n, count: count // n, is_in_other=True)


def refusals(operation: str, situation: Topology) -> dict[str, MpitrainError]:
    """Return {algorithm: error} of the algorithms that cannot run here."""
    errors = {
        name: refusal
        for name, algorithm in TABLES.get(operation, {}).items()
        if (refusal := algorithm.refusal(situation))
    }
    if operation in NATIVE:
        refusal = ALL_REDUCE["native"].refusal(situation) if operation in REDUCING else None
        if situation.is_on_device:
            refusal = CommError(
                "algorithm native is measured in the memory of the host, but --device is a GPU."
            )
        if refusal:
            errors["native"] = refusal
    return errors
