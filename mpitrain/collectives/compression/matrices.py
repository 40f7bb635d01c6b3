"""Where matrices lie in a flat array, and how a long one is cut into tiles."""

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Matrix(NamedTuple):
    """Where a matrix lies in a flat array: its first element, its shape, and the elements from row to row."""

    start: int
    rows: int
    columns: int
    stride: int

    def fits(self, count: int) -> bool:
        """Whether it lies in an array of `count` elements."""
        end = self.start + (self.rows - 1) * self.stride + self.columns
        return (
            self.start >= 0
            and 0 <= self.columns <= self.stride
            and self.rows >= 0
            and (self.rows == 0 or end <= count)
        )

    def of(self, flat: np.ndarray) -> np.ndarray:
        """The matrix in such an array, which must reach to its end."""
        strides = self.stride * flat.itemsize, flat.itemsize
        return np.lib.stride_tricks.as_strided(
            flat[self.start :], (self.rows, self.columns), strides
        )


def tiles(start: int, rows: int, columns: int) -> list[Matrix]:
    """A matrix cut along its longer side into tiles as nearly square as that allows.

    K directions are then the same part of every matrix's elements, whatever its shape. The factors of the tiles hold at most
    twice the elements that those of the whole would hold.
    """
    short, long = sorted((rows, columns))
    parts = round(long / short) if short > 1 else 1
    cuts = list(pairwise(long * part // parts for part in range(parts + 1)))
    if rows == long:
        return [Matrix(start + low * columns, high - low, columns, columns) for low, high in cuts]
    return [Matrix(start + low, rows, high - low, columns) for low, high in cuts]


def square(count: int) -> Matrix:
    """The most nearly square matrix that fits into `count` elements, from the first one on."""
    rows = max(1, math.isqrt(count))
    return Matrix(0, rows, count // rows, count // rows)
