"""What is computed on the way: combining, coding and choosing. Here on the host by NumPy; on_kernels.py on devices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.engine.codecs import CODECS, Codec, largest

Combine = Callable[[Any, Any], None]
"""(target, received): the target becomes their sum, or the larger of both."""


class Arithmetic(NamedTuple):
    """One way to compute.

    combining  (array, op) -> what combines parts of that array
    codecs     by name of the wire format, for float32
    largest    (values, k) -> positions of the k elements of largest magnitude, ascending
    """

    combining: Callable[[Any, str], Combine]
    codecs: dict[str, Codec]
    largest: Callable[[Any, int], Any]


def by_numpy(array: Any, op: str) -> Combine:
    """Universal functions, to which CuPy arrays answer too. What is not finite is no error: who asked for the sum looks."""
    function = {"add": np.add, "maximum": np.maximum}[op]

    @np.errstate(over="ignore", invalid="ignore")
    def combine(target: Any, received: Any) -> None:
        function(target, received, out=target)

    return combine


HOST = Arithmetic(by_numpy, CODECS, largest)
