"""Checks of kernel arguments against the kernel's signature, before the launch."""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from math import inf
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import KernelError
from mpitrain.kernels.source import KernelParameter, Signature

C_TYPES = {
    "float": "float32",
    "double": "float64",
    "__half": "float16",
    "__nv_bfloat16": "bfloat16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "unsigned short": "uint16",
    "int": "int32",
    "unsigned": "uint32",
    "long long": "int64",
    "unsigned long long": "uint64",
}
"""The possible types of parameters, by their C++ names."""

LIKE_ELEMENT = ("Result", "Mirror")
"""Type macros that default to Element if a launch does not define them, as in element.cuh."""

ELEMENTS = {dtype: name for name, dtype in C_TYPES.items()}
"""The C++ name of a dtype: the value of the macro `Element`."""


@cache
def name_of(dtype: np.dtype) -> str:
    """Return the dtype's name, from a cache.

    NumPy builds the name anew at each access: for all arrays, that took a third of a launch.
    """
    return dtype.name


class Argument(NamedTuple):
    """An array with properties that its dtype and shape do not show.

    fresh     the kernel writes every element before it reads any: the content is undefined before
              the launch
    strided   the kernel takes the strides as arguments: only the last dim of the array must be
              contiguous
    """

    array: Any
    fresh: bool = False
    strided: bool = False

    @property
    def dtype(self) -> None:
        """Return None: by this a cached launch recognises that the argument is no plain array."""


def fresh(array: Any) -> Argument:
    """Mark an array (or None) as an output that the kernel writes completely.

    The name in `loader.Kernels.launch(fresh=...)` has the same effect at no cost.
    """
    return Argument(array, fresh=True)


def strided(array: Any, fresh: bool = False) -> Argument:
    """Mark an array as strided: the kernel takes its strides as arguments."""
    return Argument(array, fresh=fresh, strided=True)


def _refuse(kernel: str, parameter: KernelParameter, is_what: str, way_out: str) -> None:
    raise KernelError(f"{kernel}: argument `{parameter.name}` {is_what}.", way_out)


def _array_check(
    kernel: str, parameter: KernelParameter, dtype: str, fresh: bool, strided: bool
) -> Callable[[Any], Argument]:
    def check(value: Any) -> Argument:
        argument = value if isinstance(value, Argument) else Argument(value, fresh, strided)
        array = argument.array
        if array is None:
            return argument
        if not hasattr(array, "flags"):
            _refuse(
                kernel,
                parameter,
                f"is {array!r}, not an array of {dtype}",
                "Pass an array, or None to leave it out.",
            )
        if name_of(array.dtype) != dtype:
            _refuse(
                kernel,
                parameter,
                f"is an array of {array.dtype.name}, the kernel takes {dtype}",
                "Cast it first, or launch the kernel for that element type.",
            )
        if not array.flags.c_contiguous and not (
            argument.strided and array.strides[-1] == array.itemsize
        ):
            _refuse(
                kernel,
                parameter,
                f"of shape {array.shape} and strides {array.strides} bytes is not contiguous",
                "Copy it first; only `strided` arguments may skip elements, and never in the last dim.",
            )
        return argument

    return check


def _scalar_check(
    kernel: str, parameter: KernelParameter, dtype: str
) -> Callable[[Any], np.generic]:
    kind = np.dtype(dtype)
    limits = (int(np.iinfo(kind).min), int(np.iinfo(kind).max)) if kind.kind in "iu" else None

    def check(value: Any) -> np.generic:
        if isinstance(value, (bool, np.bool_)) or not isinstance(
            value, (int, float, np.integer, np.floating)
        ):
            _refuse(kernel, parameter, f"is {value!r}, the kernel takes {dtype}", "Pass a number.")
        if limits is None:
            if float(np.finfo(kind).max) < abs(value) != inf:
                _refuse(
                    kernel,
                    parameter,
                    f"is {value!r}, beyond what {dtype} holds",
                    "Pass a smaller number.",
                )
            return kind.type(value)
        if isinstance(value, (float, np.floating)):
            _refuse(
                kernel, parameter, f"is {value!r}, the kernel takes {dtype}", "Pass an integer."
            )
        if not limits[0] <= value <= limits[1]:
            _refuse(
                kernel,
                parameter,
                f"is {value}, beyond what {dtype} holds",
                "Split the arrays into smaller ones.",
            )
        return kind.type(value)

    return check


def argument_checks(
    signature: Signature,
    defines: Mapping[str, Any],
    fresh: Collection[str] = (),
    strided: Collection[str] = (),
) -> tuple[list[Callable[[Any], Any]], tuple[tuple[Any, bool], ...]]:
    """Return one check per parameter, and `loader.Ready.wants`.

    A check returns the argument as the engine takes it, or raises KernelError.
    fresh, strided  names of parameters
    raises          KernelError if the kernel has no such array
    """
    checks: list[Callable[[Any], Any]] = []
    wants: list[tuple[Any, bool]] = []
    types = dict.fromkeys(LIKE_ELEMENT, defines.get("Element")) | dict(defines)
    for parameter in signature.parameters:
        name = str(types.get(parameter.type, parameter.type))
        if name not in C_TYPES:
            raise KernelError(
                f"{signature.name}: parameter `{parameter.name}` has the unknown type `{name}`.",
                f"Define it at the launch, or use one of {', '.join(C_TYPES)}.",
            )
        how = signature.name, parameter, C_TYPES[name]
        if parameter.is_pointer:
            checks.append(_array_check(*how, parameter.name in fresh, parameter.name in strided))
            wants.append((np.dtype(C_TYPES[name]), parameter.name in strided))
        else:
            checks.append(_scalar_check(*how))
            wants.append((None, False))
    arrays = [parameter.name for parameter in signature.parameters if parameter.is_pointer]
    if wrong := [name for name in (*fresh, *strided) if name not in arrays]:
        raise KernelError(
            f"{signature.name} has no array `{wrong[0]}`.", f"Its arrays: {', '.join(arrays)}."
        )
    return checks, tuple(wants)
