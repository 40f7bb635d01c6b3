"""Collectives between the GPUs of one host through CUDA IPC; messages carry no elements.

As in shared_memory.py and shared_memory_halves.py, each rank reads the memory of all ranks. In an
all-reduce each rank also writes to the memory of all ranks. stream_ordered.py orders this work
between the ranks, by events that they share.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from mpitrain.collectives.direct.stream_ordered import StreamOrdered
from mpitrain.collectives.engine.arithmetic import Arithmetic
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.errors import CommError, ConfigError, on_every_rank
from mpitrain.machine.backend import Recordable
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport
from mpitrain.transport.device.messages import DeviceTransport


def bind_shared_gpu(
    transport: Transport, array: Any, op: str, tag: int, arithmetic: Arithmetic
) -> Reduction | None:
    """Bind an all-reduce through GPU memory, under the conditions of `_bound`.

    order   rank r sums chunk r: its own elements first, then the elements of ranks r + 1,
            r + 2 ...: the same bits on all ranks and in every run
    """
    combine = arithmetic.combining(array, op)

    def reduce(arrays: list[Any]) -> None:
        own, *others = _turned(transport, arrays)
        for other in others:
            combine(own, other)
        for other in others:
            other[...] = own

    return _bound(transport, array, tag, reduce)


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

    return _bound(transport, array, tag, reduce)


def bind_all_gather_gpu(transport: Transport, array: Any, tag: int) -> Reduction | None:
    """Bind an all-gather through GPU memory, under the conditions of `_bound`."""
    chunks = [slice(*bounds) for bounds in chunk_bounds(array.size, transport.size)]

    def gather(arrays: list[Any]) -> None:
        for peer, chunk in enumerate(chunks):
            if peer != transport.rank:
                arrays[transport.rank][chunk] = arrays[peer][chunk]

    return _bound(transport, array, tag, gather)


def _turned(transport: Transport, arrays: list[Any]) -> list[Any]:
    """Return this rank's chunk of every rank's array, from its own array on."""
    rank = transport.rank
    start, stop = chunk_bounds(arrays[rank].size, transport.size)[rank]
    return [whole[start:stop] for whole in arrays[rank:] + arrays[:rank]]


def _bound(
    transport: Transport, array: Any, tag: int, work: Callable[[list[Any]], None]
) -> Reduction | None:
    """Return a reduction that launches `work` when all arrays are ready; collective, within a host.

    If a rank cannot open the memory or the event of another rank, the result is None on every
    rank. Rank 0 then prints one line.

    work    takes the arrays of all ranks, by rank; they stay open as long as the reduction lives
    raises  ConfigError on every rank if the ranks do not see each other's GPUs, or if the transport
            is one of host memory
    memory  while other ranks have an allocation open, it must not return to the driver; CuPy's
            pools return none
    """
    if not isinstance(transport, DeviceTransport):
        raise on_every_rank(
            ConfigError(
                "algorithm shared opens GPU memory by the backend of a device's transport, but this transport is the host's.",
                "Bind over what transport.cuda_aware.over_device makes of it, or use algorithm ring.",
            )
        )
    _check_gpus_are_seen(transport)
    try:
        arrays = _opened(transport, array.reshape(-1))
        own, others = _events(transport)
    except CommError as error:
        if transport.rank == 0:
            _say_once(f"mpitrain: algorithm shared falls back on ring. {error.law}")
        return None

    return StreamOrdered(transport, array, tag, own, others, lambda: work(arrays))


def _check_gpus_are_seen(transport: DeviceTransport) -> None:
    """Raise ConfigError on every rank unless each rank sees the GPUs of all ranks; collective.

    A process cannot open the memory of a GPU that it does not see.
    """
    everyone = transport.gather_text(transport.backend.gpus())
    for reader, (_, seen) in enumerate(everyone):
        for owner, (gpu, _) in enumerate(everyone):
            if gpu not in seen:
                raise on_every_rank(
                    ConfigError(
                        f"algorithm shared needs every rank to see the GPUs of all, but rank {reader} does not see that of rank "
                        f"{owner} ({gpu}).",
                        "Leave CUDA_VISIBLE_DEVICES and Slurm's --gpus-per-task out, or use algorithm ring.",
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
    places = transport.gather_text(on_all_ranks(transport, lambda: gpu.export(flat)))
    return on_all_ranks(
        transport,
        lambda: [
            flat if peer == transport.rank else gpu.open(handle, offset, flat)
            for peer, (handle, offset) in enumerate(places)
        ],
    )


def _events(transport: DeviceTransport) -> tuple[Recordable, list[Any]]:
    """Return an event of this rank, and the opened events of all other ranks; collective.

    raises  CommError on all ranks if one rank cannot share or open an event
    """
    gpu = transport.backend
    own = on_all_ranks(transport, gpu.shared_event)
    handles = transport.gather_text(own.handle)
    others = [handle for peer, handle in enumerate(handles) if peer != transport.rank]
    return own, on_all_ranks(transport, lambda: [gpu.open_event(handle) for handle in others])


@cache  # a run binds many arrays, but prints the line once
def _say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
