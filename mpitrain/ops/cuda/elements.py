"""The macros by which kernels learn their element types, from the dtypes of arrays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import KernelError
from mpitrain.kernels.arguments import ELEMENTS, name_of
from mpitrain.kernels.loader import Macros
from mpitrain.machine.backend import address


class Typed(Macros):
    """Macros that follow from the dtypes of arrays.

    run  RUN of element.cuh: how many elements of each of these arrays a thread takes at a time
    """

    __slots__ = ("run",)

    def __init__(self, arrays: Sequence[Any], defines: Mapping[str, Any]):
        super().__init__(**defines)
        self.run = 8 if any(array.itemsize == 2 for array in arrays) else 4


class Kind(NamedTuple):
    """What follows from the dtype of float arrays, found again without a call: see `KINDS`.

    sums    dtype of sums over their elements
    macros  Element and Sum of element.cuh
    """

    sums: np.dtype
    macros: Typed


class Kinds(dict):
    """By dtype."""

    def __missing__(self, dtype: np.dtype) -> Kind:
        like = np.empty(0, dtype)
        found = self[dtype] = Kind(np.dtype(sum_type(like)), Typed([like], element(like)))
        return found


KINDS = Kinds()


class ByDtypes(dict):
    """Macros by the dtypes of some arrays, made by `make` of such arrays when first asked for."""

    def __init__(self, make: Callable[..., dict[str, Any]]):
        super().__init__()
        self._make = make

    def __missing__(self, dtypes: tuple[np.dtype, ...]) -> Typed:
        likes = [np.empty(0, dtype) for dtype in dtypes]
        found = self[dtypes] = Typed(likes, self._make(*likes))
        return found


FLOATS = ("float32", "float64", "float16", "bfloat16")
INDICES = ("int32", "int64")


def c_type(array: Any) -> str:
    """The C++ name of a float array's elements."""
    name = name_of(array.dtype)
    if name not in FLOATS:
        raise KernelError(
            f"Kernels compute with {', '.join(FLOATS)}, not with {name}.", "Cast the array first."
        )
    return ELEMENTS[name]


def sum_type(array: Any) -> str:
    """The dtype that sums over this array's elements are held in: float64 for float64, else float32."""
    return "float64" if name_of(array.dtype) == "float64" else "float32"


def element(array: Any) -> dict[str, Any]:
    """Element and Sum of element.cuh."""
    return {"Element": c_type(array), "Sum": ELEMENTS[sum_type(array)]}


def result(array: Any, like: Any) -> dict[str, Any]:
    """Result of element.cuh: how the array is stored, where that is not as what is computed with."""
    return {} if array.dtype == like.dtype else {"Result": c_type(array)}


def in_chunks(*arrays: Any) -> int:
    """CHUNKED: whether all rows of all arrays begin at multiples of 16 bytes, so that 16 of them can be copied at a time."""
    return int(
        all(
            address(array) % 16 == 0 and not any(step % 16 for step in array.strides[:-1])
            for array in arrays
        )
    )


def index(array: Any) -> dict[str, Any]:
    """Index: the type of tokens and targets."""
    if name_of(array.dtype) not in INDICES:
        raise KernelError(
            f"Tokens and targets are {' or '.join(INDICES)}, not {array.dtype.name}.",
            "Cast them first.",
        )
    return {"Index": ELEMENTS[name_of(array.dtype)]}


INDEXED = ByDtypes(lambda x, indices: element(x) | index(indices))
"""Macros by the dtypes of (what is computed with, tokens or targets)."""
