"""The laws of messages in GPU memory, on threads, by both ways."""

import sys
import threading
from functools import partial

import numpy as np
import pytest

from mpitrain.collectives.group import bind
from mpitrain.errors import ConfigError
from mpitrain.machine import cuda
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy
from tests.fakes.pointers import PointerThreads
from tests.laws.device import CARRIERS, DeviceLaws, cuda_backend
from tests.laws.transport import few_and, laws_of, raises_comm_error


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("name", laws_of(DeviceLaws))
@few_and(5)
def test_threads_obey(name, carrier, sizes, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda, "_allocation_start", cupy.allocation_start)
    cupy.faults.clear()
    for n in sizes:
        run_ranks(
            n,
            lambda threads: getattr(DeviceLaws(), name)(
                PointerThreads(threads), carrier, cuda_backend()
            ),
        )


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_deadlock_of_messages_in_gpu_memory_is_found_and_named(carrier, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    def wait(threads):
        transport, backend = (
            DeviceLaws().device(PointerThreads(threads), carrier, cuda_backend()),
            cuda_backend(),
        )
        other = 1 - transport.rank
        receive, lost = (
            transport.start_recv(backend.zeros(4, "float64"), other, tag) for tag in (1, 2)
        )
        transport.start_send(backend.zeros(4, "float64"), other, 1).wait()
        transport.wait_until(receive.test)
        return [
            raises_comm_error(partial(transport.wait_until, lost.test, what=what))
            for what in (lost, None)
        ]

    for texts in run_ranks(2, wait):
        for rank in (0, 1):
            assert f"{rank} waits in recv from rank {1 - rank}," in texts[0]
        assert "recv from rank" in texts[1]


def test_page_locked_memory_is_its_own_whoever_else_asks_meanwhile(monkeypatch):
    """Of the fake GPU, by which the laws of staging are proven."""

    class Crowded(list):
        def append(self, memory):
            super().append(memory)
            if len(self) == 1:
                other = threading.Thread(target=lambda: found.append(cuda_backend().staging(64)))
                other.start()
                other.join()

    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy, "_pinned", Crowded())
    found = []
    found.append(cuda_backend().staging(64))
    assert not np.shares_memory(*found)


def test_ranks_that_outlive_others_share_no_memory_of_gpus(monkeypatch):
    """A device that waits for a dead rank's event would wait for ever."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    def refused(threads):
        device = DeviceLaws().device(PointerThreads(threads), "staged", cuda_backend())
        with pytest.raises(ConfigError, match="outlive"):
            bind(device, cuda_backend().zeros(3, "float64"), algorithm="shared")
        return True

    assert all(run_ranks(2, refused, outlives=True))
