"""Array arguments in guarded memory: copied in before a launch, checked for overlap, copied out
after it.
"""

import ctypes as c
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import KernelError
from mpitrain.kernels.arguments import Argument
from mpitrain.kernels.source import Signature

POISON = 0xFF  # this byte repeated is a NaN in every float type


class Buffer(c.Structure):
    """One array for the runtime; the same fields as struct Buffer of runtime.h."""

    _fields_ = [
        ("base", c.c_void_p),
        ("nbytes", c.c_size_t),
        ("element_bytes", c.c_uint),
        ("readonly", c.c_uint),
        ("fresh", c.c_uint),
        ("member", c.c_void_p),
        ("name", c.c_char_p),
        ("bytes_read", c.c_ulonglong),
        ("bytes_written", c.c_ulonglong),
        ("accesses", c.c_ulonglong),
        ("sectors", c.c_ulonglong),
    ]


class _Guarded(c.Structure):
    _fields_ = [("base", c.c_void_p), ("map", c.c_void_p), ("mapped", c.c_size_t)]


class _Copy(NamedTuple):
    """An array, its copy in guarded memory, and the objects that the copy needs to stay alive."""

    array: np.ndarray
    twin: np.ndarray
    memory: _Guarded
    buffer: Buffer
    alive: Any


def _extent(array: np.ndarray) -> tuple[int, int]:
    """Return the first address, and the bytes to the last element, with the gaps of a view."""
    if array.size == 0:
        return array.ctypes.data, 0
    low, high = np.lib.array_utils.byte_bounds(array)
    return low, high - low


def _refuse_overlap(kernel: str, name: str, array: np.ndarray, other: _Copy) -> None:
    if np.may_share_memory(array, other.array) and np.shares_memory(array, other.array):
        raise KernelError(
            f"{kernel}: arguments {other.buffer.name.decode()} and `{name}` overlap in part; one is written.",
            "Pass the same array twice for work in place, or arrays that share no element.",
        )


def _copy_in(
    runtime: c.CDLL, name: str, argument: Argument, readonly: bool, checked: bool
) -> _Copy:
    array = argument.array
    low, nbytes = _extent(array)
    memory = _Guarded()
    runtime.simulator_allocate(c.c_size_t(nbytes), c.c_size_t(low % 16), c.byref(memory))
    block = (
        np.frombuffer((c.c_ubyte * nbytes).from_address(memory.base), np.uint8)
        if nbytes
        else np.empty(0, np.uint8)
    )
    block.fill(POISON)
    twin = np.ndarray(
        array.shape, array.dtype, block, array.ctypes.data - low if nbytes else 0, array.strides
    )
    if not argument.fresh:
        twin[...] = array
    member = None
    if checked and not array.flags.c_contiguous:
        member = np.zeros(nbytes // array.itemsize, np.uint8)
        steps = tuple(step // array.itemsize for step in array.strides)
        np.ndarray(
            array.shape, np.uint8, member, (array.ctypes.data - low) // array.itemsize, steps
        )[...] = 1
    buffer = Buffer(
        memory.base,
        nbytes,
        array.itemsize,
        readonly,
        argument.fresh,
        None if member is None else member.ctypes.data,
        name.encode(),
    )
    return _Copy(array, twin, memory, buffer, member)


@contextmanager
def guarded(
    runtime: c.CDLL, signature: Signature, arguments: list[Any], checked: bool
) -> Iterator[tuple[list, list]]:
    """Copy the arrays in, yield (buffers, one C value per argument), and copy written arrays back.

    An array passed twice stays one array. After an error nothing is copied back.
    """
    copies: list[_Copy] = []
    cells: list[Any] = []
    try:
        for parameter, argument in zip(signature.parameters, arguments, strict=True):
            if not parameter.is_pointer:
                cells.append(c.create_string_buffer(argument.tobytes(), argument.nbytes))
                continue
            array = argument.array
            if array is None:
                cells.append(c.c_void_p())
                continue
            same = next(
                (
                    copy
                    for copy in copies
                    if copy.array.__array_interface__ == array.__array_interface__
                ),
                None,
            )
            if same is not None:
                same.buffer.readonly &= parameter.is_readonly
            else:
                for other in copies:
                    if not (parameter.is_readonly and other.buffer.readonly):
                        _refuse_overlap(signature.name, parameter.name, array, other)
                same = _copy_in(
                    runtime, f"`{parameter.name}`", argument, parameter.is_readonly, checked
                )
                copies.append(same)
            first = same.twin.ctypes.data if array.size else same.memory.base
            cells.append(c.c_void_p(first))
        yield [copy.buffer for copy in copies], cells
        for copy in copies:
            if not copy.buffer.readonly:
                copy.array[...] = copy.twin
    finally:
        for copy in copies:
            runtime.simulator_free(c.byref(copy.memory))
