"""Arrays without memory: NumPy arrays with shape, strides and dtype, on which nothing is computed.

They are the counterpart of PyTorch's meta tensors. All of them begin at one read-only mapping, of
which no page exists. NumPy passes a function call on such an array to the methods
`__array_ufunc__` and `__array_function__` of its class. They make the result without computing it.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpitrain.machine.backend import Lease, Maker, WithoutMemory

Shape = tuple[int, ...]


class NoAddress(TypeError):
    """An operation asks for the memory of an array that has none."""


class Weightless(WithoutMemory):
    """An array without memory, as PyTorch's tensors on the device "meta".

    Every element reads as 0, but a reduction to a number returns 1. Writes are ignored. Slices,
    transposes and reshaped views have the strides of NumPy's.

    lease   the lease that the array keeps alive, or None
    source  makes the arrays of results
    """

    lease: Lease | None
    source: WeightlessMemory

    @property
    def ctypes(self) -> Any:
        """Refuse to give an address to code that NumPy does not call."""
        raise NoAddress("an array without memory has no address")

    __array_interface__ = ctypes

    def __array_finalize__(self, other: Any) -> None:
        if isinstance(other, Weightless):
            # Fancy indices make copies, which keep no lease.
            self.lease = None if self.flags.owndata else other.lease
            self.source = other.source

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **named: Any
    ) -> Any:
        if out is not None and not any(one is None for one in out):
            return out[0] if len(out) == 1 else out
        if method == "at":
            return None
        shape = _SHAPES[method](ufunc, inputs, named)
        dtype = np.dtype(named.get("dtype") or _dtype(ufunc, method, inputs))
        source = next(each for each in inputs if isinstance(each, Weightless)).source
        result = source.made(shape, dtype) if shape else dtype.type(1)
        return result if ufunc.nout == 1 else (result,) * ufunc.nout

    def __array_function__(self, function: Any, types: Any, arguments: Any, named: Any) -> Any:
        if named.get("out") is not None:
            return named["out"]
        if function is np.copyto:
            return None
        if function in _ALIKE:
            shape = named.get("shape")
            return self.source.made(
                np.shape(arguments[0]) if shape is None else shape,
                named.get("dtype") or arguments[0].dtype,
            )
        if function is np.where and len(arguments) == 3:
            shape = np.broadcast_shapes(*map(np.shape, arguments))
            return self.source.made(shape, np.result_type(*arguments[1:]))
        return super().__array_function__(function, types, arguments, named)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore the value."""

    def fill(self, value: Any) -> None:
        """Ignore the value."""

    def copy(self, order: Any = "C") -> Any:
        return self.source.made(self.shape, self.dtype)

    def astype(self, dtype: Any, *rest: Any, copy: Any = True, **named: Any) -> Any:
        return self if self.dtype == dtype and not copy else self.source.made(self.shape, dtype)

    def reshape(self, *shape: Any, **named: Any) -> Any:
        try:
            return super().reshape(*shape, copy=False)
        except ValueError:  # NumPy would copy the elements.
            like = np.broadcast_to(np.zeros(1, np.uint8), self.shape)
            return self.source.made(like.reshape(*shape).shape, self.dtype)

    def argmax(self, axis: Any = None, *rest: Any, **named: Any) -> Any:
        return np.zeros(_reduced(self.shape, axis, False), np.int64)

    def argsort(self, *axis: Any, **named: Any) -> Any:
        """Return other columns first in each row: all experts get as many tokens."""
        *rows, columns = self.shape
        order = np.add.outer(np.arange(math.prod(rows)), np.arange(columns)) % max(1, columns)
        return order.reshape(self.shape)


class WeightlessForKernels(Weightless):
    """Stand-in without memory for a NumPy array that is an operand of kernels in the simulator."""

    @property
    def ctypes(self) -> Any:
        """An aligned address, by which operations choose kernels."""
        return SimpleNamespace(data=0)


class WeightlessOnDevice(Weightless):
    """Stand-in without memory for an array on a GPU."""

    __cuda_array_interface__ = Weightless.ctypes

    @property
    def data(self) -> Any:
        """An aligned address, by which operations choose kernels."""
        return SimpleNamespace(ptr=0)


class WeightlessMemory:
    """Allocator of an arena whose arrays have no memory.

    kind  the class of the arrays
    """

    def __init__(self, kind: type[Weightless] = Weightless) -> None:
        self._kind, self._mapping = kind, _mapping(1)

    def allocate(self, nbytes: int) -> Any:
        return self.made((nbytes,), np.uint8)

    def location(self, buffer: Any) -> Any:
        return None

    def idle(self, buffers: Sequence[Any]) -> list[bool]:
        return [True] * len(buffers)

    def trim(self) -> None:
        """Do nothing."""

    def maker(self, shape: Shape, dtype: np.dtype) -> tuple[Any, Maker]:
        return {None: None}, lambda lease: self.made(shape, dtype, lease)

    def made(self, shape: Sequence[int], dtype: Any, lease: Lease | None = None) -> Weightless:
        """Return a contiguous array without memory, which keeps the lease alive."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > len(self._mapping):
            self._mapping = _mapping(nbytes)
        array: Any = np.ndarray.__new__(self._kind, tuple(shape), dtype, self._mapping)
        array.lease, array.source = lease, self
        return array


def _mapping(nbytes: int) -> mmap.mmap:
    """Return addresses without memory: nothing is reserved for a private mapping without writes."""
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)


def _dtype(ufunc: np.ufunc, method: str, inputs: Sequence[Any]) -> np.dtype:
    """Return the dtype of the first result, from a call with one element of each input."""
    if ufunc.signature:
        return np.result_type(*inputs)
    if method not in ("__call__", "outer"):
        inputs = [inputs[0]] * ufunc.nin
    ones = [np.ones((), x.dtype) if isinstance(x, np.ndarray) else x for x in inputs]
    result = ufunc(*ones)
    return (result if ufunc.nout == 1 else result[0]).dtype


def _called(ufunc: np.ufunc, inputs: Sequence[Any], named: Mapping[str, Any]) -> Shape:
    shapes = [np.shape(x) for x in inputs]
    if not ufunc.signature:
        return np.broadcast_shapes(*shapes)
    first, second = shapes
    if ufunc is np.matmul and len(first) > 1 and len(second) > 1:
        return (*np.broadcast_shapes(first[:-2], second[:-2]), first[-2], second[-1])
    if ufunc is np.matmul:  # a matrix and a vector, or two vectors
        return (*first[:-1], *(second[:-2] + second[-1:] if len(second) > 1 else ()))
    if ufunc is np.vecdot:
        return np.broadcast_shapes(first[:-1], second[:-1])
    raise TypeError(f"{ufunc.__name__} on arrays without memory needs an argument `out`")


def _reduction(ufunc: np.ufunc, inputs: Sequence[Any], named: Mapping[str, Any]) -> Shape:
    axis = inputs[1] if len(inputs) > 1 else named.get("axis", 0)
    return _reduced(np.shape(inputs[0]), axis, named.get("keepdims", False))


def _reduced(shape: Shape, axis: Any, keepdims: bool) -> Shape:
    axes = range(len(shape)) if axis is None else np.atleast_1d(axis) % max(1, len(shape))
    lengths = [
        1 if dim in axes else length
        for dim, length in enumerate(shape)
        if keepdims or dim not in axes
    ]
    return tuple(lengths)


def _reductions_at(ufunc: np.ufunc, inputs: Sequence[Any], named: Mapping[str, Any]) -> Shape:
    array, starts = inputs[:2]
    axis = named.get("axis", 0)
    return (*array.shape[:axis], len(starts), *array.shape[axis + 1 :])


_SHAPES: dict[str, Callable[[np.ufunc, Sequence[Any], Mapping[str, Any]], Shape]] = {
    "__call__": _called,
    "reduce": _reduction,
    "reduceat": _reductions_at,
    "accumulate": lambda ufunc, inputs, named: np.shape(inputs[0]),
    "outer": lambda ufunc, inputs, named: sum(map(np.shape, inputs), ()),
}
"""(ufunc, inputs, keyword arguments) -> shape of the result, by method of a ufunc."""

_ALIKE = (np.empty_like, np.zeros_like, np.ones_like, np.full_like)
