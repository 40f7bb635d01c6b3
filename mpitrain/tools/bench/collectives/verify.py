"""Verification of a result: wrong elements of an exact operation, wrong replicas of a lossy one."""

import zlib

import numpy as np

from mpitrain.transport.base import Transport

ROUNDED = {"float16": 2**-11, "bfloat16": 2**-8}
"""Relative rounding error of one addition. Integers up to its inverse are exact.

The sums of bfloat16 exceed it from 14 ranks on.
"""


def wrong_elements(transport: Transport, result: np.ndarray, right: np.ndarray) -> int:
    """Return the number of wrong elements over all ranks.

    Large sums in a 16-bit dtype may differ by their rounding error.
    """
    is_right = result == right
    if rounded := ROUNDED.get(result.dtype.name):
        result, right = result.astype(np.float64), right.astype(np.float64)
        is_right |= (right * rounded > 1) & (
            np.abs(result - right) <= transport.size * rounded * right
        )
    return sum(transport.gather_text(int((~is_right).sum())))


def wrong_replicas(transport: Transport, replica: np.ndarray) -> int:
    """Return the number of ranks whose replica differs from rank 0's in any bit or is not finite.

    No wire format may cause this.
    """
    replicas = transport.gather_text((zlib.crc32(replica), bool(np.isfinite(replica).all())))
    return sum(bits != replicas[0][0] or not finite for bits, finite in replicas)


def error_norm(result: np.ndarray, right: np.ndarray) -> float:
    """Return the norm of a wire format's error over the norm of the exact sum."""
    return float(
        np.linalg.norm(result.astype(np.float64) - right) / np.linalg.norm(right.astype(np.float64))
    )
