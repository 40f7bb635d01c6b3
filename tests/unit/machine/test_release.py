"""Memory that goes back to the system: whole slabs without leases, and as much as the arena says."""

import sys
from pathlib import Path

import numpy as np
import pytest

from mpitrain.machine.backend import SLAB
from mpitrain.ops.device import backend_for
from tests.fakes import cupy

MB = 1 << 20


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy)


def resident():
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 4096 * pages


def filled(arena, *counts):
    """Leases of so many bytes, each written once."""
    arrays = [arena.take((count,), np.uint8) for count in counts]
    for array in arrays:
        array.fill(1)
    return arrays


def test_the_process_loses_the_bytes_that_a_release_returns():
    arena = backend_for("cpu").arena()
    arrays = filled(arena, 48 * MB, 20 * MB, 8 * MB)
    before = resident()
    assert arena.release() == 0 and abs(resident() - before) < MB
    del arrays
    released = arena.release()
    assert released == arena.released == 76 * MB and arena.held == 0
    assert abs((before - resident()) / released - 1) <= 0.05


def test_a_slab_with_a_lease_stays_and_serves_again():
    arena = backend_for("cpu").arena()
    first, second = filled(arena, SLAB // 2, SLAB // 4)
    (other,) = filled(arena, 2 * SLAB)
    place = first.ctypes.data
    del first, other
    assert arena.release() == 2 * SLAB and arena.held == 3 * SLAB // 4
    assert np.all(second == 1)
    before = arena.allocations
    assert arena.take((SLAB // 2,), np.uint8).ctypes.data == place
    assert arena.allocations == before
    del second
    assert arena.release() == 3 * SLAB // 4
    again = filled(arena, SLAB // 2)
    assert np.all(again[0] == 1) and arena.allocations == before + 1


def test_a_release_on_a_device_frees_the_pools_blocks(one_gpu):
    arena = backend_for("cuda").arena()
    first, second = arena.take((100,), np.float32), arena.take((100,), np.float32)
    del first
    assert arena.release() == 448 and arena.held == 448
    assert cupy.log()[-1] == ("free all blocks",)
    del second
    assert arena.release() == 448 and arena.held == arena.live == 0
