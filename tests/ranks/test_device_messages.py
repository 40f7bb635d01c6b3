"""The laws of messages in GPU memory, on threads, by both ways."""

import sys

import pytest

from mpitrain.machine import backend
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy
from tests.fakes.pointers import PointerThreads
from tests.laws.device import CARRIERS, DeviceLaws, cuda_backend
from tests.laws.transport import laws_of


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("name", laws_of(DeviceLaws))
def test_threads_obey(name, carrier, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(backend, "_allocation_start", cupy.allocation_start)
    cupy.faults.clear()
    for n in (1, 2, 3, 5):
        run_ranks(n, lambda threads: getattr(DeviceLaws(), name)(PointerThreads(threads), carrier, cuda_backend()))
