"""Collectives between the GPUs of one host through CUDA IPC; messages carry no elements.

As in direct.py, each rank reads the memory of all ranks. In an all-reduce each rank also writes to
the memory of all ranks. Events that the ranks share order this work on the stream of messages.

Run k of a rank has gradients G(k), which its stream of computation writes. W(k) is the rank's work on
the memory of all ranks. All ranks share two events of each: R(k) behind G(k), and D(k) behind W(k).

    computation  G(k) R(k)  | other work ...                                  | G(k+1) R(k+1)
    messages                | wait for R(k) of all ranks, W(k), D(k)          |
    host         record R(k), barrier, launch W(k), poll D(k), announce its end, await all others

The computation never waits, and the host only polls. The order is safe:

1. W(k) begins after G(k) of all ranks. A rank launches its waits after the barrier, and all ranks
   have recorded R(k) before. A wait is for the last record before it (cudaStreamWaitEvent).
2. G(k+1) overwrites no memory in use. It follows the end of run k, when D(k) of all ranks has
   passed.
3. No wait is for a later record. R(k+1) follows the end of run k, when all ranks have launched
   their waits for R(k).
4. Streams never wait in a circle, in any order of several reductions. Each wait is launched after
   the record that it is for.
5. The loss of a rank ends the run, even if a device waits for the lost rank. While a rank polls its
   device, its receives from all ranks are posted.

A caller whose computation is to wait, not its host, ends the run by `order`:

    computation  G(k) R(k)  | other work ...            | wait for D(k) of all ranks, G(k+1) R(k+1)
    host         record R(k), barrier, launch W(k) D(k), barrier, launch the waits for D(k)

6. As in 1, all ranks have recorded D(k) before a rank launches its waits for it, behind which G(k+1)
   is. D(k+1) follows the first barrier of run k+1, before which all ranks have launched these waits.
7. A device may wait for ever for a rank that is lost after the second barrier. Such a job ends as MPI
   ends it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.collectives.engine.arithmetic import Arithmetic
from mpitrain.collectives.engine.executor import Combine, Execution, Reduction
from mpitrain.collectives.plans.exchanges import barrier
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.errors import CommError, ConfigError, say
from mpitrain.machine.backend import Copy
from mpitrain.machine.cuda import SharedEvent
from mpitrain.transport.agreement import from_all_ranks, on_all_ranks
from mpitrain.transport.base import Request, Transport, named
from mpitrain.transport.device import Aside, DeviceTransport

TRIAL = 1 << 16
"""Elements of the array by which ranks prove that they can use each other's GPU memory."""


def bind_shared_gpu(
    operation: str, transport: Transport, array: Any, op: str, tag: int, arithmetic: Arithmetic
) -> Reduction | None:
    """Bind a collective through GPU memory; collective, within a host.

    None on every rank if the ranks cannot use each other's GPU memory. The first binding of a
    transport finds this out.

    operation  "allreduce", "reduce-scatter" or "all-gather"
    order      rank r sums chunk r: its own elements first, then the elements of ranks r + 1,
               r + 2 ...: the same bits on all ranks and in every run
    memory     while other ranks have an allocation open, it must not return to the driver; CuPy's
               pools return none
    """
    if not isinstance(transport, DeviceTransport) or transport.unshared:
        return None
    try:
        if transport.unshared is None and transport.size > 1:
            _prove(transport, tag, arithmetic)
        reduction = _ordered(operation, transport, array, op, tag, arithmetic)
        transport.unshared = ""
        return reduction
    except CommError as error:
        if not error.agreed:
            raise
        transport.unshared = (
            ""
            if transport.is_whole
            else f"Among ranks {str(transport.members)[1:-1]}, counted from 0: "
        ) + error.law
        return None


def _ordered(
    operation: str,
    transport: DeviceTransport,
    array: Any,
    op: str,
    tag: int,
    arithmetic: Arithmetic,
) -> StreamOrdered:
    """Return the bound collective; it keeps the arrays of all ranks open as long as it lives.

    raises  CommError on every rank if the driver of one rank refuses
    """
    arrays = _opened(transport, array.reshape(-1))
    ready, done = _events(transport), _events(transport)
    chunks = [slice(*bounds) for bounds in chunk_bounds(array.size, transport.size)]
    combine = arithmetic.combining(array, op)
    return StreamOrdered(
        transport,
        array,
        tag,
        ready,
        done,
        lambda: WORK[operation](transport.rank, arrays, chunks, combine),
    )


def _all_reduce(rank: int, arrays: list[Any], chunks: list[slice], combine: Combine) -> None:
    own, *others = _turned(rank, arrays, chunks)
    for other in others:
        combine(own, other)
    for other in others:
        other[...] = own


def _reduce_scatter(rank: int, arrays: list[Any], chunks: list[slice], combine: Combine) -> None:
    own, *others = _turned(rank, arrays, chunks)
    for other in others:
        combine(own, other)


def _all_gather(rank: int, arrays: list[Any], chunks: list[slice], combine: Combine) -> None:
    for peer, chunk in enumerate(chunks):
        if peer != rank:
            arrays[rank][chunk] = arrays[peer][chunk]


WORK = {"allreduce": _all_reduce, "reduce-scatter": _reduce_scatter, "all-gather": _all_gather}
"""The work of a rank on the arrays of all ranks, by rank."""


def _turned(rank: int, arrays: list[Any], chunks: list[slice]) -> list[Any]:
    """Return this rank's chunk of each array: of its own first, then of ranks rank + 1, rank + 2 ..."""
    return [whole[chunks[rank]] for whole in arrays[rank:] + arrays[:rank]]


def unshared_gpu(transport: Transport) -> ConfigError:
    """Return the error for a user who named "shared" where `bind_shared_gpu` has returned None.

    Only if these are all ranks of the job is the error marked as raised on every rank. Otherwise
    other groups may continue, so that this rank must end the job.
    """
    if not isinstance(transport, DeviceTransport):
        return ConfigError(
            "algorithm shared opens GPU memory by the backend of a device's transport, but this transport is the host's.",
            "Bind over what transport.cuda_aware.over_device makes of it, or use algorithm ring.",
        ).on_every_rank()
    error = ConfigError(
        f"algorithm shared needs GPUs that use each other's memory. {transport.unshared}",
        "Let every rank see all GPUs of its host (without CUDA_VISIBLE_DEVICES and Slurm's --gpus-per-task), turn the IOMMU "
        "off, or use algorithm auto.",
    )
    return error.on_every_rank() if transport.is_whole else error


def note_unshared(transport: Transport) -> None:
    """Note why these ranks use messages; rank 0 of the job prints the first reason.

    Other groups have similar reasons. A run prints theirs if rank 0 has none.
    """
    if not isinstance(transport, DeviceTransport):
        return
    if transport.unshared and transport.unshared not in transport.refusals:
        if transport.members[transport.rank] == 0 and not transport.refusals:
            say_unshared(transport.unshared)
        transport.refusals.append(transport.unshared)


def say_unshared(reason: str) -> None:
    """Print that GPUs of a host use messages, and why."""
    say(f"mpitrain: GPUs of a host exchange messages, not shared memory. {reason}")


def _prove(transport: DeviceTransport, tag: int, arithmetic: Arithmetic) -> None:
    """Sum a known pattern; CommError on every rank if the sum is wrong on any; collective.

    A driver may grant access to a GPU behind an IOMMU, which then reads and writes other memory
    without an error.
    """
    patterns = [
        ((np.arange(TRIAL) * 7 + 31 * rank) % 97 + 1).astype(np.float32)
        for rank in range(transport.size)
    ]
    array = transport.backend.from_host(patterns[transport.rank])
    _ordered("allreduce", transport, array, "add", tag, arithmetic).run()
    is_right = np.array_equal(transport.backend.to_host(array), sum(patterns))
    if wrong := [rank for rank, right in enumerate(transport.gather_text(is_right)) if not right]:
        raise CommError(
            f"The driver grants access, but a sum of known numbers was wrong on rank {', '.join(map(str, wrong))}."
        ).on_every_rank()


def _opened(transport: DeviceTransport, flat: Any) -> list[Any]:
    """Open the arrays of all other ranks, and return all arrays by rank; collective.

    A process cannot open its own allocation, so its own array is returned as it is.

    raises  CommError on all ranks if one rank cannot open an array
    """
    if not flat.size:
        return [flat] * transport.size
    gpu = transport.backend
    places = from_all_ranks(transport, lambda: gpu.export(flat))
    return on_all_ranks(
        transport,
        lambda: [
            flat if peer == transport.rank else gpu.open(handle, offset, flat)
            for peer, (handle, offset) in enumerate(places)
        ],
    )


def _events(transport: DeviceTransport) -> tuple[SharedEvent, list[Any]]:
    """Return this rank's event, and the opened events of all others; collective.

    raises  CommError on all ranks if one rank cannot share or open an event
    """
    gpu, retired = transport.backend, len(transport.retired)
    own = on_all_ranks(transport, gpu.shared_event)
    handles = transport.gather_text(own.handle)
    # All ranks are here: they have launched their waits in all runs that had ended on this one.
    del transport.retired[:retired]
    others = [handle for peer, handle in enumerate(handles) if peer != transport.rank]
    return own, on_all_ranks(transport, lambda: [gpu.open_event(handle) for handle in others])


class StreamOrdered(Reduction):
    """Collective over the GPU memory of all ranks of a host.

    ready  the events R (R, W and D as in the header of this file): this rank's, and the others', opened
    done   the events D likewise
    work   function that launches W on the current stream
    """

    is_messages = False

    def __init__(
        self,
        transport: DeviceTransport,
        array: Any,
        tag: int,
        ready: tuple[SharedEvent, Sequence[Any]],
        done: tuple[SharedEvent, Sequence[Any]],
        work: Callable[[], None],
    ):
        self._transport, self._ready, self._events, self._work = transport, ready, done, work
        self._aside = Aside(transport.backend, transport.under_way)
        plan = barrier(transport.rank, transport.size)
        self._recorded, self._launched = (
            Execution(transport, np.empty(0, np.uint8), "add", plan, tag) for _ in range(2)
        )
        self._tag, self._empty = tag, np.empty(0, np.uint8)
        self._peers = [peer for peer in range(transport.size) if peer != transport.rank]
        # Empty messages by which all ranks tell each other that their work has ended.
        self._ends: list[Request] = []
        self._done: Copy | None = None
        self._is_ordered = False  # Whether this run ends by `order`.
        # Another rank may be about to launch its waits when this one drops the reduction.
        weakref.finalize(self, transport.retired.extend, (ready[0], done[0])).atexit = False

    def order(self) -> bool:
        self._is_ordered = True
        return self.poll()

    def _steps(self) -> Iterator[Request]:
        self._is_ordered = False
        self._ready[0].record()
        self._recorded.start()
        yield self._recorded
        self._launch()
        if self._is_ordered:
            self._launched.start()
            yield self._launched
            self._follow(self._events)
            return
        transport, tag = self._transport, self._tag
        self._ends = [transport.start_recv(self._empty, peer, tag) for peer in self._peers]
        yield _Until(self._has_computed, self)
        self._ends += [transport.start_send(self._empty, peer, tag) for peer in self._peers]
        yield _Until(self._have_all_ended, self)

    def __str__(self) -> str:
        return f"{self._recorded}{self._launched}{named(self._ends)}" or "the work of this GPU"

    def _launch(self) -> None:
        """Launch the waits for R of all ranks, which have recorded it, and the work."""
        with self._aside.here():
            self._follow(self._ready)
            self._work()
            self._events[0].record()
            self._done = self._transport.backend.so_far()

    def _follow(self, events: tuple[SharedEvent, Sequence[Any]]) -> None:
        """Let the current stream wait for these events of all ranks."""
        own, others = events
        for event in (own, *others):
            self._transport.backend.follow(event)

    def _has_computed(self) -> bool:
        """Return whether D has passed; PeerLost if a rank has ended."""
        self._have_all_ended()
        assert self._done is not None  # The launch has set it.
        return self._aside.has_passed(self._done)

    def _have_all_ended(self) -> bool:
        self._ends = [request for request in self._ends if not request.test()]
        return not self._ends


class _Until:
    """A request that is complete once a function of a reduction returns True."""

    source = -1

    def __init__(self, test: Callable[[], bool], reduction: StreamOrdered):
        self.test, self._reduction = test, reduction

    def wait(self) -> None:
        self._reduction._transport.wait_until(self.test, what=self._reduction)
