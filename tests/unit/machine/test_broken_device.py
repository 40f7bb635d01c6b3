"""A failure of the device ends every wait for it with an exception; CuPy's `Event.done` would stay False."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.machine.cuda import CudaBackend
from mpitrain.transport.device import Staged
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    cupy.get_current_stream().synchronize()
    yield CudaBackend()
    cupy.devices.broken = False
    cupy.faults.clear()


def event(backend):
    """Zeros are work on the stream."""
    backend.zeros(8, np.float32)
    return backend.so_far()


def copy(backend):
    """To pinned memory."""
    return backend.start_copy(backend.staging(32), backend.zeros(8, "float32"), backend.so_far())


def mark(backend):
    """Of the device's time."""
    return backend.mark()


def put(backend):
    """A second copy from the host asks for the buffer of the first."""
    target, array = backend.zeros(3, np.float32), np.ones(3, np.float32)
    backend.put(target, array)
    return SimpleNamespace(test=lambda: backend.put(target, array))


@pytest.mark.parametrize("begin", [event, copy, mark, put])
def test_polling_ends_when_the_device_fails(backend, begin):
    request = begin(backend)
    cupy.devices.broken = True
    with pytest.raises(cupy.CUDARuntimeError, match="700"):
        while not request.test():
            pass


def test_a_staged_message_ends_when_the_device_fails(backend, monkeypatch):
    start = backend.start_copy

    def then_break(*ends):
        started = start(*ends)
        cupy.devices.broken = True
        return started

    monkeypatch.setattr(backend, "start_copy", then_break)

    def rank(host):
        Staged(host, backend, 64).start_send(backend.zeros(8, np.float64), 1 - host.rank, 0)

    with pytest.raises(cupy.CUDARuntimeError, match="700"):
        run_ranks(2, rank)


class FailsWhenFreed:
    """As CuPy's events and allocations after a failure of the device."""

    def __init__(self, error):
        self._error = error

    def __del__(self):
        raise self._error


def test_errors_of_destructors_do_not_hide_the_first_error(backend, monkeypatch):
    printed, hooks = [], set()
    monkeypatch.setattr(sys, "unraisablehook", lambda found: printed.append(found.exc_type))
    waits = backend.mark()
    cupy.devices.broken = True
    for _ in range(2):
        with pytest.raises(cupy.CUDARuntimeError):
            waits.test()
        hooks.add(id(sys.unraisablehook))
    assert len(hooks) == 1, "a loop that polls adds no hook"
    for error in (cupy.CUDARuntimeError(700), ValueError()):
        FailsWhenFreed(error)
    assert printed == [ValueError]
