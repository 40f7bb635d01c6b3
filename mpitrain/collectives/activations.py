"""Activations that travel: buffers leased from a group, with collectives that are bound to them once and found again.

An activation from the arena has another address in every call, and a collective is bound to one. So a group has buffers of
its own: each keeps what was bound to it, and is leased again for activations of as many elements.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpitrain.collectives.engine.agreement import agree
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.engine.progress import mover
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.collectives.selection.table import choices
from mpitrain.errors import CommError, multiples_near
from mpitrain.machine.arena import Arena, padded
from mpitrain.transport.base import Transport

SLAB = 32 << 20
"""Most bytes that are allocated for buffers still to come. MPI has a limited number of windows, a host little memory for them."""


class Binder(Protocol):
    """The part of a Group that activation buffers use: its ranks, and its collectives bound to an array."""

    transport: Transport
    algorithm: str
    progress_thread: str

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def bind(self, array: Any, op: str = "add") -> Reduction: ...

    def bind_reduce_scatter(self, array: Any, op: str = "add") -> Reduction: ...

    def bind_all_gather(self, array: Any) -> Reduction: ...


class Buffer:
    """A group's buffer, and what was bound to it so far.

    number    in the order in which the group made them: the same on all ranks
    raw       its bytes, padded to a multiple of 64
    elements  what collectives are bound to: (count,)
    """

    def __init__(self, number: int, raw: Any, count: int, dtype: np.dtype):
        self.number, self.raw, self.elements = (
            number,
            raw,
            raw[: count * dtype.itemsize].view(dtype),
        )
        self.bound: dict[tuple[str, str], TimedReduction] = {}

    def settle(self) -> None:
        """Wait for what is still under way: somebody gave the lease up before its end."""
        for reduction in self.bound.values():
            if not reduction.poll():
                reduction.wait()


@dataclass
class StallTime:
    """How many seconds a rank has stood still so far."""

    seconds: float = 0.0


class TimedReduction:
    """A Reduction over another one, which counts how long its rank stands still for it.

    It does not know its group, which would refer to itself then, and keep what lies in windows beyond its last use.
    """

    def __init__(
        self, inner: Reduction, waited: StallTime, transport: Transport, progress_thread: str
    ):
        self._inner, self._waited, self._transport, self._progress_thread = (
            inner,
            waited,
            transport,
            progress_thread,
        )
        self.algorithm, self.is_messages, self.state, self.learn = (
            inner.algorithm,
            inner.is_messages,
            inner.state,
            inner.learn,
        )
        self.start, self.poll, self.scratch_bytes = inner.start, inner.poll, inner.scratch_bytes

    def run(self) -> None:
        began = time.perf_counter()
        self._inner.run()
        self._waited.seconds += time.perf_counter() - began

    def wait(self) -> None:
        began = time.perf_counter()
        self._inner.wait()
        self._waited.seconds += time.perf_counter() - began

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Reduce while the block computes, and wait at its end. Between hosts a thread moves the messages meanwhile."""
        moving = mover(self._transport, [self._inner], self._progress_thread)
        moving.start(self._inner)
        yield
        moving.leave()
        self.wait()


class ActivationBuffer:
    """An activation of all ranks of a group, and the collectives that work on it in place.

    The lease ends when nothing refers to `array` or a view of it any more, this object included. If a collective is still under
    way then, whoever leases the buffer next waits for it.

    array   uninitialised, contiguous, of the shape and dtype that were asked for
    """

    def __init__(self, group: Binder, waited: StallTime, buffer: Buffer, array: Any):
        self._group, self._waited, self._buffer, self.array = group, waited, buffer, array

    def all_reduce(self, op: str = "add") -> TimedReduction:
        """The all-reduce of the array. Collective where the buffer has none yet."""
        return self._found("all-reduce", op, lambda elements: self._group.bind(elements, op))

    def reduce_scatter(self, op: str = "add") -> TimedReduction:
        """The reduction ends in `own`, or `own_rows`; the rest is scratch. Collective where the buffer has none yet."""
        return self._found(
            "reduce-scatter", op, lambda elements: self._group.bind_reduce_scatter(elements, op)
        )

    def all_gather(self) -> TimedReduction:
        """`own`, or `own_rows`, of every rank ends in the array. Collective where the buffer has none yet."""
        return self._found("all-gather", "", self._group.bind_all_gather)

    @property
    def own(self) -> Any:
        """This rank's chunk of the elements (plans.chunk_bounds): flat, a view."""
        start, stop = chunk_bounds(self.array.size, self._group.size)[self._group.rank]
        return self.array.reshape(-1)[start:stop]

    @property
    def own_rows(self) -> Any:
        """The same chunk as rows: (rows / ranks, length of the last dim), a view. All dims but the last count as rows.

        raises  CommError if the rows do not divide by the ranks
        """
        rows, n = math.prod(self.array.shape[:-1]), self._group.size
        if rows % n:
            raise CommError(
                f"rank {self._group.rank}: every rank needs equally many rows of an activation, but {rows} rows are "
                f"to be divided by {n} ranks.",
                f"Use {multiples_near(rows, n)} rows.",
            )
        return self.own.reshape(rows // n, self.array.shape[-1])

    def _found(self, operation: str, op: str, bind: Callable[[Any], Reduction]) -> TimedReduction:
        bound, key = self._buffer.bound, (operation, op)
        if key not in bound:
            group = self._group
            bound[key] = TimedReduction(
                bind(self._buffer.elements), self._waited, group.transport, group.progress_thread
            )
        return bound[key]


class ActivationPool:
    """The buffers of one group, by count and dtype.

    Ranks lease the same in the same order, and at every lease the same ones have ended on each, in whatever order: all ranks then
    get the buffer of one number. Nothing checks the second condition but where a buffer is made: ranks for which it does not
    hold wait for each other, or reduce different activations.

    arena   counts leases as its own, and the buffers made for them
    waited  for collectives of leases
    """

    def __init__(self, arena: Arena):
        self._arena, self.waited = arena, StallTime()
        self._buffers: list[Buffer] = []
        self._free: dict[tuple[int, np.dtype], list[Buffer]] = {}
        self._rest: Any = np.empty(0, np.uint8)

    def lease(self, group: Binder, shape: Sequence[int], dtype: Any) -> ActivationBuffer:
        """A free buffer, or a new one."""
        shape, dtype = tuple(shape), np.dtype(dtype)
        count = math.prod(shape)
        free = self._free.setdefault((count, dtype), [])
        if free:
            buffer = min(free, key=_number)
            free.remove(buffer)
            buffer.settle()
        else:
            buffer = self._made(group, count, dtype)
        return ActivationBuffer(
            group, self.waited, buffer, self._arena.lend(buffer.raw, shape, dtype, buffer, free)
        )

    def close(self) -> None:
        """Wait for what is under way, and keep no buffer; those that are leased go with their leases. Collective."""
        for buffer in self._buffers:
            buffer.settle()
        self._buffers, self._free, self._rest = [], {}, np.empty(0, np.uint8)

    def _made(self, group: Binder, count: int, dtype: np.dtype) -> Buffer:
        """A new buffer; collective. CommError on every rank if they do not want the same."""
        number, nbytes = len(self._buffers), padded(count * dtype.itemsize)
        agree(
            group.transport,
            "exchange",
            np.empty(0, dtype),
            choices("allreduce"),
            group.algorithm,
            size=count,
            buffer=number,
        )
        if self._rest.nbytes < nbytes:
            taken = sum(buffer.raw.nbytes for buffer in self._buffers)
            self._rest = group.transport.allocate(max(nbytes, min(taken, SLAB)), np.uint8)
        if not self._buffers:
            group.transport.tenants.add(self.close)
        buffer = Buffer(number, self._rest[:nbytes], count, dtype)
        self._rest = self._rest[nbytes:]
        self._buffers.append(buffer)
        self._arena.allocations += 1
        return buffer


def _number(buffer: Buffer) -> int:
    return buffer.number
