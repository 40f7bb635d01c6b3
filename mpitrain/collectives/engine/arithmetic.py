"""Arithmetic of collectives: combining, encoding and selecting elements.

This module computes in NumPy on the host; device_arithmetic.py uses our kernels on a device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.engine.codecs import CODECS, Codec, largest

Combine = Callable[[Any, Any], None]
"""(target, received): replaces the target by the element-wise sum or maximum of both."""


class Arithmetic(NamedTuple):
    """Implementation of the computations within collectives.

    combining  (array, op) -> function that combines received elements into regions of that array
    codecs     {name of the wire format: codec for float32}
    largest    (values, k) -> positions of the k elements of largest magnitude, ascending
    """

    combining: Callable[[Any, str], Combine]
    codecs: dict[str, Codec]
    largest: Callable[[Any, int], Any]


def by_numpy(array: Any, op: str) -> Combine:
    """Return a Combine of NumPy's universal functions, which also dispatch to CuPy arrays.

    Results that are not finite raise no error and no warning: the caller checks the sum.
    """
    function = {"add": np.add, "maximum": np.maximum}[op]

    @np.errstate(over="ignore", invalid="ignore")
    def combine(target: Any, received: Any) -> None:
        function(target, received, out=target)

    return combine


HOST = Arithmetic(by_numpy, CODECS, largest)
