"""Copies to a GPU through pinned buffers: the host does not wait, and no buffer changes under a copy."""

import sys

import numpy as np
import pytest

from mpitrain.machine.cuda import LARGEST, CudaBackend
from tests.fakes import cupy


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cupy.get_current_stream().synchronize()
    cupy.log().clear()
    cupy.faults.clear()
    yield CudaBackend()
    assert not cupy.faults


@pytest.fixture
def allocated(monkeypatch):
    sizes, allocate = [], cupy.cuda.alloc_pinned_memory
    monkeypatch.setattr(
        cupy.cuda, "alloc_pinned_memory", lambda nbytes: sizes.append(nbytes) or allocate(nbytes)
    )
    return sizes


@pytest.mark.parametrize("count", [0, 1, 7, 128, 4099])
@pytest.mark.parametrize("dtype", ["int64", "float32", "float16"])
def test_a_copy_does_not_wait_and_its_array_may_change_at_once(backend, count, dtype):
    target, array = backend.zeros(count, dtype), np.arange(count).astype(dtype)
    backend.put(target, array)
    right, array[:] = array.copy(), 0
    assert ("synchronize",) not in cupy.log()
    assert cupy.log() == [("copy", array.nbytes)] * bool(count)
    assert np.array_equal(backend.to_host(target), right)


def test_work_started_later_finds_the_copied_values(backend):
    target = backend.from_host(np.full(5, 2.0), backend.arena())
    target += target
    assert ("synchronize",) not in cupy.log()
    assert backend.to_host(target).tolist() == [4.0] * 5


def test_a_buffer_is_used_again_only_after_its_copy(backend, allocated):
    targets = [backend.zeros(100, np.int64) for _ in range(6)]
    for number, target in enumerate(
        targets
    ):  # A fake event is done when asked for the second time.
        backend.put(target, np.full(100, number))
    backend.synchronize()
    assert [backend.to_host(target)[0] for target in targets] == [0, 1, 2, 3, 4, 5]
    before = len(allocated)
    assert 2 <= before <= 6 and set(allocated) == {1024}
    for _ in range(20):
        backend.put(targets[0], np.arange(100))
        backend.synchronize()
    assert len(allocated) - before <= 1


def test_an_array_beyond_the_largest_buffer_gets_none(backend, allocated, monkeypatch):
    monkeypatch.setattr("mpitrain.machine.cuda.LARGEST", 64)
    target, array = backend.zeros(9, np.int64), np.arange(9)
    backend.put(target, array)
    array[:] = 0
    assert backend.to_host(target).tolist() == [*range(9)] and not allocated
    assert LARGEST >= 1 << 20


def test_the_fake_finds_a_buffer_that_changes_too_early(backend, monkeypatch):
    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda ptr: 0)
    target = backend.zeros(3, np.int64)
    backend.put(target, np.arange(3))
    backend.put(target, np.arange(3) + 1)
    backend.synchronize()
    assert cupy.faults
    cupy.faults.clear()
