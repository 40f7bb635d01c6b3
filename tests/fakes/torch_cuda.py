"""CUDA tensors for a PyTorch without CUDA: their memory and their streams are those of tests.fakes.cupy.

PyTorch's operations on them are work on the current stream of the fake; only copies to the host wait.
"""

import threading
from contextlib import contextmanager, nullcontext

import torch

from mpitrain.torch import calls
from tests.fakes import cupy


class Tensor(torch.Tensor):
    """A CUDA tensor in the memory of a fake CuPy array. C++ sees a tensor without memory ("meta").

    is_recorded  whether PyTorch was told that another stream uses the memory, too
    """

    is_cuda, device, is_recorded = True, torch.device("cuda", 0), False

    @staticmethod
    def __new__(cls, array, dtype=None):
        dtype = dtype or torch.from_numpy(array.truth).dtype
        strides = [step // array.itemsize for step in array.strides]
        return torch.Tensor._make_wrapper_subclass(
            cls, array.shape, strides=strides, dtype=dtype, device="meta"
        )

    def __init__(self, array, dtype=None):
        self.array = array

    def data_ptr(self):
        return self.array.data.ptr

    def record_stream(self, stream):
        self.is_recorded = True

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        options = dict(options or {})
        if str(options.pop("device", "")) == "cpu":
            return torch.from_numpy(arguments[0].array.get())
        schema = function._schema
        seen = [one for one in arguments if isinstance(one, Tensor)]
        if not isinstance(arguments[0], Tensor):  # a copy to the host
            return function(arguments[0], torch.from_numpy(arguments[1].array.get()), **options)
        plain = [
            torch.from_numpy(one.array.truth) if isinstance(one, Tensor) else one
            for one in arguments
        ]
        alias = schema.returns[0].alias_info
        if alias and not alias.is_write:
            found = function(*plain, **options)
            views = found if isinstance(found, list | tuple) else [found]
            made = [Tensor(seen[0].array._like(view.numpy())) for view in views]
            return made if isinstance(found, list | tuple) else made[0]
        if alias:  # in place
            read = [one.array for one in seen[1:]]
            cupy.launch([seen[0].array], read, lambda: function(*plain, **options))
            return seen[0]
        result = function(*plain, **options)
        new = cupy.empty(tuple(result.shape), result.numpy().dtype)
        cupy.launch(
            [new], [one.array for one in seen], lambda: torch.from_numpy(new.truth).copy_(result)
        )
        return Tensor(new)


class Event(cupy.Event):
    """An event of torch.cuda."""

    def query(self):
        return self.done


class Stream:
    """A stream of torch.cuda around one of the fake."""

    def __init__(self, device=None, fake=None):
        self._fake = fake or cupy.Stream(non_blocking=True)
        self.cuda_stream = self._fake.ptr

    def record_event(self):
        return self._fake.record(Event(disable_timing=True))

    def wait_event(self, event):
        self._fake.wait_event(event)

    def synchronize(self):
        self._fake.synchronize()


class Future:
    """A future of C++ (ATen/core/ivalue_inl.h): its value is used behind the streams on which it was set.

    An event is recorded only for a device that has tensors of the value. A callback runs on a new stream, behind
    these events, and so does who waits.
    """

    def __init__(self, *, devices=()):
        self._devices, self._events, self._callbacks = devices, [], []
        self._lock, self._ended, self._result, self._error = (
            threading.Lock(),
            threading.Event(),
            None,
            None,
        )

    def set_result(self, result, error=None):
        parts = result if isinstance(result, list) else [result]
        used = {part.device for part in parts if isinstance(part, Tensor)}
        assert used <= {*self._devices}, (used, self._devices)
        with self._lock:
            self._result, self._error = result, error
            self._events = [torch.cuda.current_stream().record_event() for _ in used]
            self._ended.set()
        for callback in self._callbacks:
            callback()

    def then(self, callback):
        following = Future(devices=self._devices)

        def run():
            with cupy.Stream(non_blocking=True) if self._devices else nullcontext():
                self._follow()
                try:
                    following.set_result(callback(self))
                except Exception as error:
                    following.set_result(None, error)

        with self._lock:
            if not (is_ended := self._ended.is_set()):
                self._callbacks.append(run)
        if is_ended:
            run()
        return following

    def value(self):
        if self._error:
            raise self._error
        return self._result

    def wait(self):
        self._ended.wait()
        self._follow()
        return self.value()

    def _follow(self):
        for event in self._events:
            torch.cuda.current_stream().wait_event(event)


@contextmanager
def current_device(device):
    """Make a device the current one of this thread in a block, as torch.cuda.device does."""
    before = cupy.cuda.runtime.getDevice()
    cupy.devices.current.index = device.index
    try:
        yield
    finally:
        cupy.devices.current.index = before


def play(monkeypatch):
    """Let torch.cuda have the fake's streams; CuPy's context of a stream sets both."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: Stream(fake=cupy.get_current_stream())
    )
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: current_device(Tensor.device))
    monkeypatch.setattr(torch.cuda, "device", current_device)
    monkeypatch.setattr(calls, "Future", Future)
