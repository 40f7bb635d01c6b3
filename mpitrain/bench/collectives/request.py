"""What a benchmark of collectives is asked to measure."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.collectives.engine.agreement import check_name
from mpitrain.collectives.engine.codecs import Wire
from mpitrain.errors import ConfigError


class SweepRequest(NamedTuple):
    """What to measure.

    algorithms  names; none for all that can run here
    iterations  timed runs per row; 0: as many as fit in SECONDS, from 5 to 500
    warmup      runs before those, at least 1
    buffers     where the arrays lie: "window" (shared by the ranks of a host, as in training) or "plain"; of an all-reduce also
                "leased": where a group leases activations
    wires       lossy formats to measure beside the algorithms of an all-reduce
    stops       leave out arrays so long that what they take follows from shorter ones
    sweeps      times that the whole list is gone through, so that rows to compare alternate
    device      kind of the device whose memory holds the arrays and whose kernels reduce them
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
    """A dtype by name; ConfigError for one that cannot be reduced."""
    check_name("dtype", name, ("float32", "float64", "float16", "bfloat16", "int32"))
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401  registers the name with NumPy
    return np.dtype(name)


def sizes(least: int, most: int, factor: float) -> list[int]:
    """Bytes from least to most, each `factor` times the one before; ConfigError if there are none, or no end of them."""
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
    found, size = [], float(least)
    while size <= most * 1.000001:
        found.append(round(size))
        size *= factor
    return found
