"""Collectives between the GPUs of one host through CUDA IPC; messages carry no elements.

As in shared_memory.py and shared_memory_halves.py, each rank reads the memory of all ranks. In an
all-reduce each rank also writes to the memory of all ranks. stream_ordered.py orders this work
between the ranks, by events that they share.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.collectives.direct.stream_ordered import StreamOrdered
from mpitrain.collectives.engine.arithmetic import Arithmetic
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.errors import CommError, ConfigError, on_every_rank
from mpitrain.machine.backend import Recordable
from mpitrain.transport.agreement import from_all_ranks, on_all_ranks
from mpitrain.transport.base import Transport
from mpitrain.transport.device import DeviceTransport

TRIAL = 1 << 16
"""Elements of the array by which ranks prove that they can use each other's GPU memory."""


def bind_shared_gpu(
    transport: Transport, array: Any, op: str, tag: int, arithmetic: Arithmetic
) -> Reduction | None:
    """Bind an all-reduce through GPU memory, under the conditions of `_bound`.

    order   rank r sums chunk r: its own elements first, then the elements of ranks r + 1,
            r + 2 ...: the same bits on all ranks and in every run
    """
    return _bound(transport, array, tag, arithmetic, _reducing(transport, array, op, arithmetic))


def bind_reduce_scatter_gpu(
    transport: Transport, array: Any, op: str, tag: int, arithmetic: Arithmetic
) -> Reduction | None:
    """Bind a reduce-scatter through GPU memory, under the conditions of `_bound`.

    The order of summation is the same as in the all-reduce.
    """
    combine = arithmetic.combining(array, op)

    def reduce(arrays: list[Any]) -> None:
        own, *others = _turned(transport, arrays)
        for other in others:
            combine(own, other)

    return _bound(transport, array, tag, arithmetic, reduce)


def bind_all_gather_gpu(
    transport: Transport, array: Any, tag: int, arithmetic: Arithmetic
) -> Reduction | None:
    """Bind an all-gather through GPU memory, under the conditions of `_bound`."""
    chunks = [slice(*bounds) for bounds in chunk_bounds(array.size, transport.size)]

    def gather(arrays: list[Any]) -> None:
        for peer, chunk in enumerate(chunks):
            if peer != transport.rank:
                arrays[transport.rank][chunk] = arrays[peer][chunk]

    return _bound(transport, array, tag, arithmetic, gather)


def unshared_gpu(transport: Transport) -> ConfigError:
    """Return the error of a request for "shared" by name where `_bound` has returned None.

    If these are not all ranks, other groups may go on, so that this rank must end the job.
    """
    if not isinstance(transport, DeviceTransport):
        return on_every_rank(
            ConfigError(
                "algorithm shared opens GPU memory by the backend of a device's transport, but this transport is the host's.",
                "Bind over what transport.cuda_aware.over_device makes of it, or use algorithm ring.",
            )
        )
    error = ConfigError(
        f"algorithm shared needs GPUs that use each other's memory. {transport.unshared}",
        "Let every rank see all GPUs of its host (without CUDA_VISIBLE_DEVICES and Slurm's --gpus-per-task), turn the IOMMU "
        "off, or use algorithm auto.",
    )
    return on_every_rank(error) if transport.is_whole else error


def _reducing(
    transport: Transport, array: Any, op: str, arithmetic: Arithmetic
) -> Callable[[list[Any]], None]:
    """Return the work of an all-reduce on the arrays of all ranks, which are like `array`."""
    combine = arithmetic.combining(array, op)

    def reduce(arrays: list[Any]) -> None:
        own, *others = _turned(transport, arrays)
        for other in others:
            combine(own, other)
        for other in others:
            other[...] = own

    return reduce


def _turned(transport: Transport, arrays: list[Any]) -> list[Any]:
    """Return this rank's chunk of every rank's array, from its own array on."""
    rank = transport.rank
    start, stop = chunk_bounds(arrays[rank].size, transport.size)[rank]
    return [whole[start:stop] for whole in arrays[rank:] + arrays[:rank]]


def _bound(
    transport: Transport,
    array: Any,
    tag: int,
    arithmetic: Arithmetic,
    work: Callable[[list[Any]], None],
) -> Reduction | None:
    """Return a reduction that launches `work` when all arrays are ready; collective, within a host.

    None on every rank if the ranks cannot use each other's GPU memory. The first binding of a
    transport finds this out.

    work    takes the arrays of all ranks, by rank; they stay open as long as the reduction lives
    memory  while other ranks have an allocation open, it must not return to the driver; CuPy's
            pools return none
    """
    if not isinstance(transport, DeviceTransport) or transport.unshared:
        return None
    try:
        if transport.unshared is None and transport.size > 1:
            _prove(transport, tag, arithmetic)
        reduction = _ordered(transport, array, tag, work)
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


def note_unshared(transport: DeviceTransport) -> None:
    """Note why these ranks use messages; rank 0 of the job prints the first reason.

    Other groups have similar reasons. A run prints theirs if rank 0 has none.
    """
    if transport.unshared and transport.unshared not in transport.refusals:
        if transport.members[transport.rank] == 0 and not transport.refusals:
            say_unshared(transport.unshared)
        transport.refusals.append(transport.unshared)


def say_unshared(reason: str) -> None:
    """Print that GPUs of a host use messages, and why."""
    print(
        f"mpitrain: GPUs of a host exchange messages, not shared memory. {reason}",
        file=sys.stderr,
        flush=True,
    )


def _ordered(
    transport: DeviceTransport, array: Any, tag: int, work: Callable[[list[Any]], None]
) -> StreamOrdered:
    """Return the reduction of `_bound`; CommError on every rank if the driver of one rank refuses."""
    arrays = _opened(transport, array.reshape(-1))
    own, others = _events(transport)
    return StreamOrdered(transport, array, tag, own, others, lambda: work(arrays))


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
    _ordered(transport, array, tag, _reducing(transport, array, "add", arithmetic)).run()
    is_right = np.array_equal(transport.backend.to_host(array), sum(patterns))
    if wrong := [rank for rank, right in enumerate(transport.gather_text(is_right)) if not right]:
        raise on_every_rank(
            CommError(
                f"The driver grants access, but a sum of known numbers was wrong on rank {', '.join(map(str, wrong))}."
            )
        )


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


def _events(transport: DeviceTransport) -> tuple[Recordable, list[Any]]:
    """Return this rank's event, and the opened events of all others; collective.

    raises  CommError on all ranks if one rank cannot share or open an event"""
    gpu = transport.backend
    own = on_all_ranks(transport, gpu.shared_event)
    handles = transport.gather_text(own.handle)
    others = [handle for peer, handle in enumerate(handles) if peer != transport.rank]
    return own, on_all_ranks(transport, lambda: [gpu.open_event(handle) for handle in others])
