"""A ring all-reduce between the ranks that start this, on arrays of a device: correct, and how long it takes.

mpirun -n 2 python jobs/gpu/ring.py DEVICE yes|no BYTES    whether GPU pointers go to MPI or are staged; rank 0 prints JSON
"""

import json
import sys
import time
from statistics import median

import numpy as np

from mpitrain.collectives.group import Group
from mpitrain.collectives.on_kernels import arithmetic_of
from mpitrain.machine import process
from mpitrain.ops.device import device_for
from mpitrain.transport.cuda_aware import cuda_messages, over_device
from mpitrain.transport.mpi import connect

RUNS = 11


def main(kind: str, aware: str, nbytes: int) -> None:
    """Wrong elements over all ranks, and the median over runs of the slowest rank's seconds."""
    process.choose_gpu(kind)
    host, device = connect(), device_for(kind)
    backend = device.backend
    if kind == "cuda" and aware == "yes" and not (asked := cuda_messages(host, "auto")).cuda:
        if host.rank == 0:
            print(json.dumps({"refused": f"MPI {asked.how}"}))
        return
    transport = over_device(host, backend, aware)
    array = transport.allocate(nbytes // 4, "float32")
    mine = np.arange(array.size, dtype=np.float32) % 1009 + host.rank
    truth = host.size * (mine - host.rank) + sum(range(host.size))
    original, reduction = backend.from_host(mine), Group(transport, "ring", arithmetic=arithmetic_of(device)).bind(array)
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
    slowest = median(map(max, zip(*host.gather_text(times), strict=True)))
    everywhere = sum(host.gather_text(wrong))
    if host.rank == 0:
        print(json.dumps({"seconds": slowest, "wrong": everywhere, "bytes": array.nbytes, "ranks": host.size}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
