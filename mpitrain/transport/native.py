"""MPI's own broadcast, reduce, reduce-scatter, all-gather and all-to-all: peers for benchmarks.

Only benchmarks call these. A transport without an MPI library computes the same results by
`expected`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mpitrain.errors import CommError, on_every_rank
from mpitrain.transport.failures.guard import Guard
from mpitrain.transport.mpi_requests import MpiCalls

OPERATIONS = ("broadcast", "reduce", "reduce-scatter", "all-gather", "all-to-all")
"""The names, as in `mpitrain bench`. Broadcast and reduce have root 0."""

ROOTED = ("broadcast", "reduce")
"""The operations with a root: some ranks may leave them before others enter."""

MOST = (1 << 31) - 1
"""Largest number of elements in one call of an MPI-3 library."""


class Communicator(MpiCalls, Protocol):
    """The part of an MPI transport that these collectives use."""

    comm: Any
    size: int

    def guard(self, what: str) -> Guard: ...

    def _message(self, array: np.ndarray) -> tuple[list, Any]: ...


def library_call(
    transport: Communicator, operation: str, array: np.ndarray, other: np.ndarray
) -> Callable[[], None]:
    """Return a function that runs one blocking collective of the library; see
    `Transport.bind_native`.
    """
    if array.size > MOST:
        raise on_every_rank(
            CommError(
                f"{transport.own_name}: one call of MPI's own {operation} takes {MOST} elements, but the "
                f"array has {array.size}.",
                "Lower --max-bytes, or leave out algorithm native.",
            )
        )
    comm, in_place, add = transport.comm, transport.MPI.IN_PLACE, transport.MPI.SUM
    _, unit = transport._message(array[:1])
    whole, parts = [array, array.size, unit], [array, array.size // transport.size, unit]
    others = [other, array.size // transport.size, unit]
    is_root = transport.rank == 0
    name, arguments = {
        "broadcast": ("Bcast", (whole, 0)),
        "reduce": ("Reduce", (in_place, whole, add, 0) if is_root else (whole, None, add, 0)),
        "reduce-scatter": ("Reduce_scatter_block", (parts, others, add)),
        "all-gather": ("Allgather", (in_place, parts)),
        "all-to-all": ("Alltoall", (others, parts)),
    }[operation]
    call, lock = getattr(comm, name), transport.job.lock
    guard = transport.guard(f"MPI's own {operation}")
    if operation in ROOTED:
        guard.awaits = ()

    def run() -> None:
        with lock, guard:
            call(*arguments)

    return run


def expected(operation: str, brought: Sequence[Any], rank: int) -> np.ndarray:
    """Return the array that the collective leaves on `rank`, computed without MPI.

    brought  the input array of every rank, by rank
    """
    n = len(brought)
    chunks = (
        [np.split(array, n) for array in brought]
        if operation not in ("broadcast", "reduce")
        else []
    )
    if operation == "broadcast":
        return brought[0]
    if operation == "reduce":
        return np.sum(brought, axis=0) if rank == 0 else brought[rank]
    if operation == "reduce-scatter":
        return np.sum([parts[rank] for parts in chunks], axis=0)
    return np.concatenate(
        [
            parts[rank if operation == "all-to-all" else source]
            for source, parts in enumerate(chunks)
        ]
    )
