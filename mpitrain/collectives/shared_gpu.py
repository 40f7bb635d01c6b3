"""All-reduce without messages between GPUs: the ranks of one host reduce each other's memory, opened through CUDA IPC.

As in shared.py, each rank reduces its 1/n of the array out of all ranks' memory and writes the result to all of them,
between two barriers. Other processes cannot wait for a rank's stream: it does so itself before each barrier.
"""

import sys
from functools import cache
from typing import Any

import numpy as np

from mpitrain.collectives.arithmetic import Arithmetic
from mpitrain.collectives.compose import Chain, Local
from mpitrain.collectives.execute import Execution, Reduction
from mpitrain.collectives.pairwise import barrier
from mpitrain.collectives.plans import chunk_bounds
from mpitrain.errors import CommError, ConfigError, on_every_rank
from mpitrain.transport.agreed import agreed
from mpitrain.transport.base import Transport
from mpitrain.transport.device import DeviceTransport


def bind_shared_gpu(transport: Transport, array: Any, op: str, tag: int, arithmetic: Arithmetic) -> Reduction | None:
    """Bind an all-reduce through GPU memory that all ranks have opened; it stays open as long as the reduction lives.

    Collective, over the ranks of one host. None on every rank, and one line from rank 0, if a rank cannot open another's
    memory; ConfigError if the ranks do not see each other's GPUs, or pass a transport of host memory.
    order   chunk r is summed on rank r, its own part first, then those of ranks r + 1, r + 2 ...: the same bits on all
            ranks and in every run
    memory  the driver must not get an array's allocation back while other ranks have it open; CuPy's pools keep theirs
    """
    if not isinstance(transport, DeviceTransport):
        raise on_every_rank(ConfigError(
            "algorithm shared opens GPU memory by the backend of a device's transport, but this transport is the host's.",
            "Bind over what transport.cuda_aware.over_device makes of it, or use algorithm ring."))
    _check_gpus_are_seen(transport)
    rank, n, gpu = transport.rank, transport.size, transport.backend
    try:
        arrays = _opened(transport, array.reshape(-1))
    except CommError as error:
        if rank == 0:
            _say_once(f"mpitrain: algorithm shared falls back on ring. {error.law}")
        return None
    start, stop = chunk_bounds(array.size, n)[rank]
    own, *others = [whole[start:stop] for whole in arrays[rank:] + arrays[:rank]]
    combine = arithmetic.combining(array, op)

    def reduce() -> None:
        for other in others:
            combine(own, other)
        for other in others:
            other[...] = own
        gpu.synchronize()

    meeting = Execution(transport, np.empty(0, np.uint8), "add", barrier(rank, n), tag)
    return Chain(transport, [Local(gpu.synchronize), meeting, Local(reduce), meeting])


def _check_gpus_are_seen(transport: DeviceTransport) -> None:
    """ConfigError on every rank unless each sees the GPUs of all: memory of a hidden one cannot be opened. Collective."""
    everyone = transport.gather_text(transport.backend.gpus())
    for reader, (_, seen) in enumerate(everyone):
        for owner, (gpu, _) in enumerate(everyone):
            if gpu not in seen:
                raise on_every_rank(ConfigError(
                    f"algorithm shared needs every rank to see the GPUs of all, but rank {reader} does not see that of rank "
                    f"{owner} ({gpu}).",
                    "Leave CUDA_VISIBLE_DEVICES and Slurm's --gpus-per-task out, or use algorithm ring."))


def _opened(transport: DeviceTransport, flat: Any) -> list[Any]:
    """Every rank's array, by rank; a process cannot open its own. Collective; CommError on all ranks if one cannot."""
    if not flat.size:
        return [flat] * transport.size
    gpu = transport.backend
    places = transport.gather_text(agreed(transport, lambda: gpu.export(flat)))
    return agreed(transport, lambda: [flat if peer == transport.rank else gpu.open(handle, offset, flat)
                                      for peer, (handle, offset) in enumerate(places)])


@cache    # many arrays are bound, one after the other
def _say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
