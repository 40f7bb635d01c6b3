"""Part of the GPU job: an all-reduce between ranks that share one GPU: correct, and how long it takes.

mpirun -n 2 python3 jobs/gpu/ring.py DEVICE WAY    WAY: staged (by host memory), pointers (to MPI), ipc (no messages)

A refusal is a result: an MPI that is not CUDA-aware takes no pointers, and a driver may refuse to share memory.
"""

import sys
import time
from statistics import median
from typing import Any

import numpy as np
from table import emit, micro, wrong_words

from mpitrain.collectives.engine.arithmetic import arithmetic_of
from mpitrain.collectives.group import Group
from mpitrain.machine import process
from mpitrain.ops.device import device_for
from mpitrain.transport.device import cuda_messages, over_device
from mpitrain.transport.mpi import connect

RUNS = 11
NBYTES = {"cuda": 64 << 20, "cuda-sim": 64 << 10}
SETTINGS = {"staged": "no", "pointers": "yes", "ipc": "no"}


def main(kind: str, way: str) -> None:
    process.choose_gpu(kind)
    host, device = connect(), device_for(kind)
    what = f"all-reduce of {host.size} ranks on one device, {way}"
    if kind != "cuda" and way != "staged":
        refuse(host, f"{what}: there is no GPU here")
    elif way == "pointers" and not (asked := cuda_messages(host, "auto")).cuda:
        refuse(host, f"{what}: refused, MPI {asked.how}")
    else:
        measure(host, device, what, way)


def refuse(host: Any, words: str) -> None:
    if host.rank == 0:
        emit(words)


def measure(host: Any, device: Any, what: str, way: str) -> None:
    """Wrong elements over all ranks, and the median over runs of the slowest rank's seconds."""
    backend = device.backend
    transport = over_device(host, backend, SETTINGS[way])
    array = transport.allocate(NBYTES[backend.kind] // 4, "float32")
    mine = np.arange(array.size, dtype=np.float32) % 1009 + host.rank
    truth = host.size * (mine - host.rank) + sum(range(host.size))
    original = backend.from_host(mine)
    reduction = Group(
        transport, "auto" if way == "ipc" else "ring", arithmetic=arithmetic_of(device)
    ).bind(array)
    if way == "ipc" and reduction.algorithm != "shared":
        refuse(host, f"{what}: refused by the driver, {reduction.algorithm} stands in")
    times, wrong = [], 0
    for _ in range(RUNS):
        array[...] = original
        backend.synchronize()
        transport.barrier()
        start = time.perf_counter()
        reduction.run()
        backend.synchronize()
        times.append(time.perf_counter() - start)
        wrong += int((~(backend.to_host(array) == truth)).sum())
    seconds = median(map(max, zip(*host.gather_text(times), strict=True)))
    everywhere = sum(host.gather_text(wrong))
    bus = 2 * (host.size - 1) / host.size * array.nbytes / seconds / 1e9
    if host.rank == 0:
        emit(
            f"{what}, {array.nbytes:,} bytes, {bus:.2f} GB/s bus bandwidth{wrong_words(everywhere)}",
            micro(seconds),
            ok=everywhere == 0,
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
