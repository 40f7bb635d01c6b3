"""Collectives without messages between GPUs: the ranks of one host reduce each other's memory, opened through CUDA IPC.

As in shared.py and shared_halves.py, each rank reads out of all ranks' memory, and an all-reduce writes to all of them,
between two barriers. Other processes cannot wait for a rank's stream: it does so itself before each barrier.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from mpitrain.collectives.engine.arithmetic import Arithmetic
from mpitrain.collectives.engine.compose import Chain, LocalReduction
from mpitrain.collectives.engine.executor import Execution, Reduction
from mpitrain.collectives.plans.pairwise import barrier
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.errors import CommError, ConfigError, on_every_rank
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport
from mpitrain.transport.device.messages import DeviceTransport


def bind_shared_gpu(
    transport: Transport, array: Any, op: str, tag: int, arithmetic: Arithmetic
) -> Reduction | None:
    """Bind an all-reduce through GPU memory, under the conditions of `_bound`.

    order   chunk r is summed on rank r, its own part first, then those of ranks r + 1, r + 2 ...: the same bits on all
            ranks and in every run
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
    """Bind a reduce-scatter through GPU memory, under the conditions of `_bound`, in the order of the all-reduce."""
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
    """This rank's chunk of every rank's array: its own first, then those of the ranks after it."""
    rank = transport.rank
    start, stop = chunk_bounds(arrays[rank].size, transport.size)[rank]
    return [whole[start:stop] for whole in arrays[rank:] + arrays[:rank]]


def _bound(
    transport: Transport, array: Any, tag: int, work: Callable[[list[Any]], None]
) -> Reduction | None:
    """What does some work on every rank's array, by rank, between two barriers; they stay open as long as it lives.

    Collective, over the ranks of one host. None on every rank, and one line from rank 0, if a rank cannot open another's
    memory; ConfigError if the ranks do not see each other's GPUs, or pass a transport of host memory.
    memory  the driver must not get an array's allocation back while other ranks have it open; CuPy's pools keep theirs
    """
    if not isinstance(transport, DeviceTransport):
        raise on_every_rank(
            ConfigError(
                "algorithm shared opens GPU memory by the backend of a device's transport, but this transport is the host's.",
                "Bind over what transport.cuda_aware.over_device makes of it, or use algorithm ring.",
            )
        )
    _check_gpus_are_seen(transport)
    gpu = transport.backend
    try:
        arrays = _opened(transport, array.reshape(-1))
    except CommError as error:
        if transport.rank == 0:
            _say_once(f"mpitrain: algorithm shared falls back on ring. {error.law}")
        return None

    def run() -> None:
        work(arrays)
        gpu.synchronize()

    meeting = Execution(
        transport, np.empty(0, np.uint8), "add", barrier(transport.rank, transport.size), tag
    )
    return Chain(
        transport, [LocalReduction(gpu.synchronize), meeting, LocalReduction(run), meeting]
    )


def _check_gpus_are_seen(transport: DeviceTransport) -> None:
    """ConfigError on every rank unless each sees the GPUs of all: memory of a hidden one cannot be opened. Collective."""
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
    """Every rank's array, by rank; a process cannot open its own. Collective; CommError on all ranks if one cannot."""
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


@cache  # many arrays are bound, one after the other
def _say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
