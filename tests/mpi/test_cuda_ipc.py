"""Processes that reduce each other's GPU memory, on a GPU whose streams take their time (tests.fakes.processes)."""

import gc
import sys

import numpy as np
import pytest

from mpitrain.collectives.cuda_ipc import StreamOrdered
from mpitrain.collectives.engine.executor import ProgressEngine
from mpitrain.collectives.group import bind
from mpitrain.machine import cuda
from mpitrain.machine.cuda import CudaBackend
from mpitrain.transport.device import Staged
from tests.fakes.processes import Gpu

COUNTS = (1001, 0, 3, 50)  # elements of buckets that are in flight together
RUNS = 2


def brought(rank, count, run):
    """Different on every rank, place and run; whole numbers, so that sums are exact."""
    return (np.arange(count) * 7 + 31 * rank + 101 * run) % 97 - 40.0


@pytest.mark.parametrize("mpi_ranks", [3])
def test_processes_sum_exactly_with_several_buckets_in_flight(
    mpi_ranks, transport, tmp_path, monkeypatch
):
    gpu = Gpu(transport.gather_text(str(tmp_path))[0], transport.rank)
    monkeypatch.setitem(sys.modules, "cupy", gpu)
    monkeypatch.setattr(cuda, "_allocation_start", gpu.allocation_start)
    memory = CudaBackend()
    over = Staged(transport, memory)
    for _ in range(2):  # memory and events that are closed open again
        arrays = [memory.zeros(3 + count, "float64")[3:] for count in COUNTS]
        reductions = [bind(over, array, algorithm="shared") for array in arrays]
        assert all(isinstance(one, StreamOrdered) for one in reductions)
        assert len(gpu.opened) == (mpi_ranks - 1) * (3 * len(COUNTS) - 1), "not of empty arrays"
        moving = ProgressEngine(over)
        for run in range(RUNS):
            for array, reduction in zip(arrays, reductions, strict=True):
                array[...] = memory.from_host(brought(transport.rank, array.size, run))
                moving.start(reduction)
                moving.poll()
            moving.wait()
            for array in arrays:
                total = sum(brought(rank, array.size, run) for rank in range(mpi_ranks))
                assert np.array_equal(memory.to_host(array), total), run
        del moving, reductions, reduction
        gc.collect()
        assert gpu.opened == []
        transport.barrier()
