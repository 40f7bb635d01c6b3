"""Macros that give kernels their element types, from the dtypes of arrays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import KernelError
from mpitrain.kernels.arguments import ELEMENTS, name_of
from mpitrain.kernels.loader import Macros
from mpitrain.machine.backend import address


class Typed(Macros):
    """Macros that follow from the dtypes of arrays.

    run  RUN of element.cuh: the number of elements of each array that a thread takes at a time
    """

    __slots__ = ("run",)

    def __init__(self, arrays: Sequence[Any], defines: Mapping[str, Any]):
        super().__init__(**defines)
        self.run = 8 if any(array.itemsize == 2 for array in arrays) else 4


class Kind(NamedTuple):
    """The macros and the dtype of sums of one float dtype, cached in `KINDS`.

    sums    dtype of sums over elements of this dtype
    macros  Element and Sum of element.cuh
    """

    sums: np.dtype
    macros: Typed


class Kinds(dict):
    """A cache of `Kind` by dtype."""

    def __missing__(self, dtype: np.dtype) -> Kind:
        like = np.empty(0, dtype)
        kind = self[dtype] = Kind(np.dtype(sum_type(like)), Typed([like], element(like)))
        return kind


KINDS = Kinds()


class ByDtypes(dict):
    """A cache of macros by the dtypes of some arrays; `make` builds missing entries from empty
    arrays.
    """

    def __init__(self, make: Callable[..., dict[str, Any]]):
        super().__init__()
        self._make = make

    def __missing__(self, dtypes: tuple[np.dtype, ...]) -> Typed:
        likes = [np.empty(0, dtype) for dtype in dtypes]
        typed = self[dtypes] = Typed(likes, self._make(*likes))
        return typed


FLOATS = ("float32", "float64", "float16", "bfloat16")
INDICES = ("int32", "int64")


def c_type(array: Any) -> str:
    """Return the C++ name of a float array's elements."""
    name = name_of(array.dtype)
    if name not in FLOATS:
        raise KernelError(
            f"Kernels compute with {', '.join(FLOATS)}, not with {name}.", "Cast the array first."
        )
    return ELEMENTS[name]


def sum_type(array: Any) -> str:
    """Return the dtype of sums over this array's elements: float64 for float64, else float32."""
    return "float64" if name_of(array.dtype) == "float64" else "float32"


def element(array: Any) -> dict[str, Any]:
    """Return the macros Element and Sum of element.cuh."""
    return {"Element": c_type(array), "Sum": ELEMENTS[sum_type(array)]}


def result(array: Any, like: Any) -> dict[str, Any]:
    """Return the macro Result of element.cuh, if `array` is stored in another dtype than `like`.

    Kernels compute with the dtype of `like`.
    """
    return {} if array.dtype == like.dtype else {"Result": c_type(array)}


def in_chunks(*arrays: Any) -> int:
    """Return CHUNKED: 1 if all rows of all arrays begin at multiples of 16 bytes, otherwise 0.

    With 1, a kernel copies 16 bytes at a time.
    """
    return int(
        all(
            address(array) % 16 == 0 and not any(step % 16 for step in array.strides[:-1])
            for array in arrays
        )
    )


def index(array: Any) -> dict[str, Any]:
    """Return the macro Index: the type of tokens and targets."""
    if name_of(array.dtype) not in INDICES:
        raise KernelError(
            f"Tokens and targets are {' or '.join(INDICES)}, not {array.dtype.name}.",
            "Cast them first.",
        )
    return {"Index": ELEMENTS[name_of(array.dtype)]}


INDEXED = ByDtypes(lambda x, indices: element(x) | index(indices))
"""Macros by the dtypes of (the array that a kernel computes with, tokens or targets)."""
