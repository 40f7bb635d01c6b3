"""Matrices within a flat array, and the division of a long matrix into tiles."""

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Matrix(NamedTuple):
    """Location of a matrix in a flat array.

    start          first element
    rows, columns  shape
    stride         row stride, in elements
    """

    start: int
    rows: int
    columns: int
    stride: int

    def fits(self, count: int) -> bool:
        """Return whether the matrix is inside an array of `count` elements."""
        end = self.start + (self.rows - 1) * self.stride + self.columns
        return (
            self.start >= 0
            and 0 <= self.columns <= self.stride
            and self.rows >= 0
            and (self.rows == 0 or end <= count)
        )

    def of(self, flat: np.ndarray) -> np.ndarray:
        """Return the matrix as a view (rows, columns) of a flat array that is long enough."""
        strides = self.stride * flat.itemsize, flat.itemsize
        return np.lib.stride_tricks.as_strided(
            flat[self.start :], (self.rows, self.columns), strides
        )


def tiles(start: int, rows: int, columns: int) -> list[Matrix]:
    """Divide a matrix along its longer side into tiles that are as nearly square as possible.

    K directions then cover the same fraction of every matrix's elements, whatever its shape. The
    factors of the tiles have at most twice the elements of the factors of the whole matrix.
    """
    short, long = sorted((rows, columns))
    parts = round(long / short) if short > 1 else 1
    cuts = list(pairwise(long * part // parts for part in range(parts + 1)))
    if rows == long:
        return [Matrix(start + low * columns, high - low, columns, columns) for low, high in cuts]
    return [Matrix(start + low, rows, high - low, columns) for low, high in cuts]


def square(count: int) -> Matrix:
    """Return the most nearly square matrix within the first `count` elements."""
    rows = max(1, math.isqrt(count))
    return Matrix(0, rows, count // rows, count // rows)
