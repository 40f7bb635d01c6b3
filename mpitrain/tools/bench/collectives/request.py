"""The request of a benchmark of collectives: algorithms, sizes, buffers and repetitions."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.collectives.engine.arithmetic import Wire
from mpitrain.collectives.engine.executor import check_name
from mpitrain.errors import ConfigError


class SweepRequest(NamedTuple):
    """The request of one benchmark.

    algorithms  names; empty: all that can run here
    sizes       bytes of the arrays
    iterations  timed runs per row; 0: as many as fit in SECONDS, from 5 to 500
    warmup      untimed runs before the timed ones, at least 1
    buffers     memory of the arrays: "window" (shared by the ranks of a host, as in training) or
                "plain"; for an all-reduce also "leased": activation buffers of a group
    wires       compressed formats to measure together with the algorithms of an all-reduce
    stops       leave out arrays between those whose time is proportional to their size and the largest
                bucket; time long runs once
    sweeps      repetitions of the whole list, so that rows to compare alternate
    device      kind of the device that holds the arrays and reduces them
    """

    operation: str
    algorithms: Sequence[str]
    sizes: Sequence[int]
    dtype: np.dtype
    iterations: int
    warmup: int
    buffers: Sequence[str]
    sweeps: int
    wires: Sequence[Wire] = ()
    device: str = "cpu"
    stops: bool = False


def dtype_of(name: str) -> np.dtype:
    """Return a dtype by name; ConfigError if it cannot be reduced."""
    check_name("dtype", name, ("float32", "float64", "float16", "bfloat16", "int32"))
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401  registers the name with NumPy
    return np.dtype(name)


def sizes(least: int, most: int, factor: float) -> list[int]:
    """Return sizes in bytes from least to most, each `factor` times the previous one.

    Raise ConfigError if the list would be empty or endless.
    """
    if not 1.01 <= factor < math.inf:
        raise ConfigError(
            f"Sizes grow by a factor of 1.01 or more, but this is {factor:g}.",
            "Set --factor to 2 or 4.",
        )
    if not 1 <= least <= most:
        raise ConfigError(
            f"Sizes go from the smallest array (at least 1 byte) to the largest, but these are {least} and {most}.",
            "Set --min-bytes and --max-bytes.",
        )
    rounded, size = [], float(least)
    while size <= most * 1.000001:
        rounded.append(round(size))
        size *= factor
    return rounded
