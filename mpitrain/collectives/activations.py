"""Activation buffers: leased from a group, with collectives that are bound to each buffer once.

A collective is bound to an address, but an activation from the arena has a new address in every
call. So a group has its own buffers. Each one keeps its bound collectives, and is leased again
for activations of the same number of elements and dtype.
"""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.engine.executor import Reduction, agree
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.collectives.selection.table import choices
from mpitrain.errors import CommError, multiples_near
from mpitrain.machine.arena import Arena, padded

SLAB = 32 << 20
"""Largest number of bytes that are allocated in advance for later buffers.

MPI has a limited number of windows, and a host has little memory for them.
"""


class BoundBuffer(NamedTuple):
    """Memory of a group for activations, with the collectives that are bound to it so far.

    number    in the order in which the group made its buffers: the same on all ranks
    raw       bytes, padded to a multiple of 64
    elements  array that collectives are bound to: (count,)
    bound     {(operation, op): reduction}; of an all-to-all or a shift, op has the number of the other buffer
    """

    number: int
    raw: Any
    elements: Any
    bound: dict[tuple[str, str], Reduction]


class ActivationBuffer:
    """Lease of an activation's buffer from a Group, with collectives; all but the all-to-all and the
    shift work in place.

    Methods `bound_...` return a reduction of the buffer, and do not run it. The first call of each
    method for a buffer binds the reduction, and so is collective.

    The lease ends when no reference to `array`, to a view of it or to this object is left. If a
    reduction is still in flight then, the next lease of the buffer waits for it.

    array   uninitialised, contiguous, of the shape and dtype of the lease
    """

    def __init__(self, group: Any, buffer: BoundBuffer, array: Any):
        self._group, self._buffer, self.array = group, buffer, array

    def bound_all_reduce(self, op: str = "add") -> Reduction:
        return self._bound("all-reduce", op, lambda elements: self._group.bind(elements, op))

    def bound_reduce_scatter(self, op: str = "add") -> Reduction:
        """Return a reduce-scatter that leaves this rank's chunk of the sum in `own` (or `own_rows`).

        The rest of the array is then scratch.
        """
        return self._bound(
            "reduce-scatter", op, lambda elements: self._group.bind_reduce_scatter(elements, op)
        )

    def bound_all_gather(self) -> Reduction:
        """Return an all-gather of the `own` (or `own_rows`) of each rank."""
        return self._bound("all-gather", "", self._group.bind_all_gather)

    def bound_all_to_all(self, incoming: "ActivationBuffer") -> Reduction:
        """Return an all-to-all, out of place: chunk q of this array on rank p becomes chunk p of
        `incoming` on rank q.

        incoming  another lease of the same group, with as many elements of the same dtype
        """
        return self._apart("all-to-all", self._group.bind_all_to_all, incoming)

    def bound_shift(self, incoming: "ActivationBuffer", distance: int = 1) -> Reduction:
        """Return a shift, out of place: this array on rank r becomes `incoming` on rank r + distance.

        incoming  as in `bound_all_to_all`
        """
        return self._apart("shift", self._group.bind_shift, incoming, distance)

    def _apart(
        self,
        operation: str,
        bind: Callable[..., Reduction],
        incoming: "ActivationBuffer",
        *more: int,
    ) -> Reduction:
        buffer = incoming._buffer
        return self._bound(
            operation,
            " ".join(map(str, (buffer.number, *more))),
            lambda elements: bind(elements, buffer.elements, *more),
        )

    @property
    def own(self) -> Any:
        """This rank's chunk of the elements (see `chunk_bounds`), as a 1-D view."""
        start, stop = chunk_bounds(self.array.size, self._group.size)[self._group.rank]
        return self.array.reshape(-1)[start:stop]

    @property
    def own_rows(self) -> Any:
        """This rank's chunk as rows, a view: (rows / ranks, length of the last dim).

        All dims but the last count as rows.

        raises  CommError if the number of rows is no multiple of the number of ranks
        """
        rows, n = math.prod(self.array.shape[:-1]), self._group.size
        if rows % n:
            raise CommError(
                f"rank {self._group.rank}: every rank needs equally many rows of an activation, but {rows} rows are "
                f"to be divided by {n} ranks.",
                f"Use {multiples_near(rows, n)} rows.",
            )
        return self.own.reshape(rows // n, self.array.shape[-1])

    def _bound(self, operation: str, op: str, bind: Callable[[Any], Reduction]) -> Reduction:
        bound, key = self._buffer.bound, (operation, op)
        if key not in bound:
            bound[key] = bind(self._buffer.elements)
            bound[key].exposed = self._group.exposed
        return bound[key]


class ActivationPool:
    """Pool of a group's activation buffers, by number of elements and dtype.

    All ranks must lease the same shapes and dtypes in the same order. Whenever they lease, the same
    earlier leases must have ended on all ranks. Then all ranks get the buffer of the same number.
    These conditions are checked only when a buffer is allocated. Ranks that break them elsewhere
    wait for each other, or reduce different activations.

    arena   counts the bytes of the leases, and the allocations for them
    """

    def __init__(self, arena: Arena):
        self._arena = arena
        self._buffers: list[BoundBuffer] = []
        self._free: dict[tuple[int, np.dtype], list[BoundBuffer]] = {}
        self._rest: Any = np.empty(0, np.uint8)

    def lease(self, group: Any, shape: Sequence[int], dtype: Any) -> ActivationBuffer:
        shape, dtype = tuple(shape), np.dtype(dtype)
        count = math.prod(shape)
        free = self._free.setdefault((count, dtype), [])
        if free:
            buffer = min(free, key=attrgetter("number"))
            free.remove(buffer)
            _settle(buffer)
        else:
            buffer = self._made(group, count, dtype)
        return ActivationBuffer(
            group, buffer, self._arena.lend(buffer.raw, shape, dtype, buffer, free)
        )

    def close(self) -> None:
        """Wait for all reductions in flight, and drop all buffers; collective.

        Leased buffers live until their leases end.
        """
        for buffer in self._buffers:
            _settle(buffer)
        self._buffers, self._free, self._rest = [], {}, np.empty(0, np.uint8)

    def _made(self, group: Any, count: int, dtype: np.dtype) -> BoundBuffer:
        """Allocate a buffer; collective. CommError on every rank if sizes or dtypes differ."""
        number, nbytes = len(self._buffers), padded(count * dtype.itemsize)
        agree(
            group.transport,
            "exchange",
            np.empty(0, dtype),
            choices("allreduce"),
            group.algorithm,
            compares=group.compares,
            size=count,
            buffer=number,
        )
        if self._rest.nbytes < nbytes:
            taken = sum(buffer.raw.nbytes for buffer in self._buffers)
            self._rest = group.transport.allocate(max(nbytes, min(taken, SLAB)), np.uint8)
        if not self._buffers:
            group.transport.tenants.add(self.close)
        raw, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        buffer = BoundBuffer(number, raw, raw[: count * dtype.itemsize].view(dtype), {})
        self._buffers.append(buffer)
        self._arena.allocations += 1
        return buffer


def _settle(buffer: BoundBuffer) -> None:
    """Wait for reductions that are still in flight, because their lease ended early."""
    for reduction in buffer.bound.values():
        if not reduction.poll():
            reduction.wait()
