"""CUDA tensors for a PyTorch without CUDA: their memory and their streams are those of tests.fakes.cupy.

PyTorch's operations on them are work on the current stream of the fake; only copies to the host wait.
"""

from contextlib import contextmanager

import torch

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
