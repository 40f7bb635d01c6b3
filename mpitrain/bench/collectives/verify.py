"""Whether a run's result is right: wrong elements of an exact operation, wrong replicas of a lossy one."""

import zlib

import numpy as np

from mpitrain.transport.base import Transport

ROUNDED = {"float16": 2**-11, "bfloat16": 2**-8}
"""Of one sum, relative to it, where it is more than 1 over this: up to there whole numbers are exact. 14 ranks get beyond."""


def wrong_elements(transport: Transport, found: np.ndarray, right: np.ndarray) -> int:
    """Elements, over all ranks, that are not what they must be: not near it, for sums that a short dtype rounds."""
    is_right = found == right
    if rounded := ROUNDED.get(found.dtype.name):
        found, right = found.astype(np.float64), right.astype(np.float64)
        is_right |= (right * rounded > 1) & (
            np.abs(found - right) <= transport.size * rounded * right
        )
    return sum(transport.gather_text(int((~is_right).sum())))


def wrong_replicas(transport: Transport, found: np.ndarray) -> int:
    """Ranks whose result differs from rank 0's in any bit, or is not finite: what a wire format must never do."""
    replicas = transport.gather_text((zlib.crc32(found), bool(np.isfinite(found).all())))
    return sum(bits != replicas[0][0] or not finite for bits, finite in replicas)


def error_norm(found: np.ndarray, right: np.ndarray) -> float:
    """The norm of what a wire format loses or adds, over the norm of the sum."""
    return float(
        np.linalg.norm(found.astype(np.float64) - right) / np.linalg.norm(right.astype(np.float64))
    )
