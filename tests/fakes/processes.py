"""A GPU that real processes share: memory and events are files, and each stream is a thread that takes its time.

It has as much of CuPy as collectives through CUDA IPC need. `tests.fakes.cupy` finds races by rules; here they happen.
"""

import ctypes
import itertools
import os
import queue
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

LONGEST = 2e-3
"""Seconds of the longest delay before a piece of work."""


class CUDARuntimeError(RuntimeError):
    """The error class of CuPy; this fake never raises it."""


class Gpu:
    """One process's CuPy, to stand in `sys.modules`.

    folder  where the processes of one GPU keep its memory and events
    seed    of the delays of this process
    """

    __version__ = "fake"

    def __init__(self, folder, seed):
        self._folder, self._numbers = Path(folder), itertools.count(1)
        self.rng, self.blocks, self.events, self.opened = np.random.default_rng(seed), {}, {}, []
        self.current = Stream(self)
        self.cuda = SimpleNamespace(
            Stream=lambda non_blocking: Stream(self),
            Event=lambda disable_timing, interprocess=False: Event(self, interprocess),
            get_current_stream=lambda: self.current,
            UnownedMemory=lambda ptr, size, owner, device_id: SimpleNamespace(ptr=ptr, owner=owner),
            MemoryPointer=lambda memory, offset: SimpleNamespace(
                ptr=memory.ptr + offset, memory=memory, device_id=0
            ),
            runtime=SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError,
                getDeviceCount=lambda: 1,
                getDevice=lambda: 0,
                deviceGetPCIBusId=lambda index: "0000:17:00.0",
                eventQuery=lambda ptr: 0 if self.events[ptr].has_passed() else 600,
                eventDestroy=self._close,
                ipcGetMemHandle=lambda ptr: self.blocks[ptr][0].encode(),
                ipcOpenMemHandle=lambda handle: self._opened(self._map(handle.decode(), "r+")),
                ipcCloseMemHandle=self._close,
                deviceSynchronize=lambda: self.current.synchronize(),
                ipcGetEventHandle=lambda ptr: self.events[ptr].name.encode(),
                ipcOpenEventHandle=lambda handle: self._opened(
                    Event(self, True, handle.decode()).ptr
                ),
            ),
        )
        self.ndarray = lambda shape, dtype, pointer: Array(self, shape, dtype, pointer)

    def file(self, name, mode, nbytes=None):
        """A file of the GPU, mapped into this process."""
        return np.memmap(self._folder / name, np.uint8, mode, shape=nbytes)

    def name(self):
        """A name that no other process and no other file has."""
        return f"{os.getpid()}-{next(self._numbers)}"

    def _map(self, name, mode, nbytes=None):
        memory = self.file(name, mode, nbytes)
        self.blocks[memory.ctypes.data] = name, memory
        return memory.ctypes.data

    def _opened(self, ptr):
        self.opened.append(ptr)
        return ptr

    def _close(self, ptr):
        self.opened.remove(ptr)

    def allocation_start(self, address):
        """Where the allocation begins that holds an address."""
        return max(
            ptr for ptr, (_, memory) in self.blocks.items() if ptr <= address < ptr + memory.nbytes
        )

    def zeros(self, count, dtype):
        """As cupy.zeros."""
        ptr = self._map(self.name(), "w+", max(1, count * np.dtype(dtype).itemsize))
        return Array(self, (count,), dtype, SimpleNamespace(ptr=ptr, device_id=0))

    def asarray(self, array):
        """As cupy.asarray, of an array of the host."""
        made, source = self.zeros(array.size, array.dtype), array.copy()
        self.current.do(lambda: np.copyto(made.host, source))
        return made

    def asnumpy(self, array):
        """As cupy.asnumpy."""
        self.current.synchronize()
        return array.host.copy()


class Stream:
    """Work in order, each piece after a delay, while the host goes on."""

    def __init__(self, gpu):
        self._gpu, self._works, self._outside = gpu, queue.SimpleQueue(), []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            work = self._works.get()
            time.sleep(LONGEST * self._gpu.rng.random() ** 4)
            work()

    def do(self, work):
        """Start a piece of work."""
        self._works.put(work)

    def record(self, event):
        number = int(event.state[0]) + 1
        event.state[0] = number
        self.do(lambda: event.state.__setitem__(1, number))
        return event

    def wait_event(self, event):
        state = self._gpu.events[event.ptr].state
        number = int(state[0])  # the last record until now

        def wait():
            while state[1] < number:
                time.sleep(1e-5)

        self.do(wait)

    def synchronize(self):
        ended = threading.Event()
        self.do(ended.set)
        ended.wait()

    def __enter__(self):
        self._outside.append(self._gpu.current)
        self._gpu.current = self

    def __exit__(self, *error):
        self._gpu.current = self._outside.pop()


class Event:
    """The numbers of its last record and of the last record that a stream has passed; in a file if processes share it."""

    def __init__(self, gpu, is_shared, opened=None):
        self.name, self.ptr = opened or gpu.name(), next(gpu._numbers)
        self.state = (
            gpu.file(self.name, "r+" if opened else "w+", 16).view(np.int64)
            if is_shared
            else np.zeros(2, np.int64)
        )
        gpu.events[self.ptr] = self

    def has_passed(self):
        return self.state[1] >= self.state[0]


class Array:
    """The attributes of cupy.ndarray that collectives need."""

    __cuda_array_interface__ = property()

    def __init__(self, gpu, shape, dtype, data):
        self._gpu, self.data, self.dtype = gpu, data, np.dtype(dtype)
        count = int(np.prod(shape))
        memory = (ctypes.c_ubyte * (count * self.dtype.itemsize)).from_address(data.ptr)
        self.host = np.frombuffer(memory, self.dtype).reshape(shape)
        self.shape, self.size, self.nbytes = self.host.shape, count, self.host.nbytes
        self.itemsize, self.flags = self.dtype.itemsize, self.host.flags

    def __getitem__(self, key):
        view = self.host[key]
        offset = view.ctypes.data - self.host.ctypes.data if view.size else 0
        data = SimpleNamespace(ptr=self.data.ptr + offset, device_id=0, owner=self.data)
        return Array(self._gpu, view.shape, self.dtype, data)

    def __setitem__(self, key, value):
        self._gpu.current.do(lambda: np.copyto(self.host[key], value.host))

    def reshape(self, *shape):
        return Array(self._gpu, self.host.reshape(*shape).shape, self.dtype, self.data)

    def __array_ufunc__(self, ufunc, method, *inputs, out):
        hosts, target = [array.host for array in inputs], out[0].host
        self._gpu.current.do(lambda: ufunc(*hosts, out=target))
        return out[0]

    def __iadd__(self, other):
        return np.add(self, other, out=self)
