"""Weights of 8 bits: a code for each element, and a scale for each row (an output of a layer).

value = (code - 128) x scale, and the scale of a row is its largest magnitude / 127. In a flat
buffer, a weight is one run of bytes: its codes, padded to 8 bytes, then its scales.

N rows, K columns.
"""

from typing import Any, NamedTuple

import numpy as np


class Coded(NamedTuple):
    """A weight of 8 bits: codes (N, K) uint8, and scales (N,), float64 in a float64 buffer, else
    float32.
    """

    codes: Any
    scales: Any

    def numbers(self) -> np.ndarray:
        """Decode the weight. Codes and scales must be in host memory."""
        return (self.codes.astype(self.scales.dtype) - 128) * self.scales[:, None]


def length(rows: int, columns: int, itemsize: int) -> int:
    """Return the number of elements that a weight takes in a flat buffer.

    itemsize  bytes of an element of the buffer
    """
    return -(-(_start(rows, columns) + rows * _scale(itemsize).itemsize) // itemsize)


def view(flat: Any, rows: int, columns: int) -> Coded:
    """Return the codes and scales in a region of a flat buffer, which `encoded` has made."""
    scale, start = _scale(flat.dtype.itemsize), _start(rows, columns)
    held = flat.view(np.uint8)
    codes = held[: rows * columns].reshape(rows, columns)
    return Coded(codes, held[start : start + rows * scale.itemsize].view(scale))


def encoded(values: np.ndarray, largest: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Encode a weight: return the elements that represent it in a flat buffer.

    values   the weight, (N, K)
    largest  largest magnitude of each row of the unsharded weight, (N,)
    dtype    dtype of the flat buffer
    """
    rows, columns = values.shape
    elements = np.zeros(length(rows, columns, dtype.itemsize), dtype)
    coded = view(elements, rows, columns)
    coded.scales[:] = largest / 127
    inverse = np.divide(1, coded.scales, out=np.zeros(rows), where=coded.scales > 0)
    coded.codes[...] = np.clip(np.rint(values * inverse[:, None]), -127, 127) + 128
    return elements


def _start(rows: int, columns: int) -> int:
    return -(-rows * columns // 8) * 8


def _scale(itemsize: int) -> np.dtype:
    return np.dtype(np.float64 if itemsize == 8 else np.float32)
