"""Matrix products: by NumPy's BLAS, or by Intel's MKL if installed (`pip install 'mpitrain[mkl]'`).

On Intel processors with AVX-512, MKL is 10 to 15% faster than the OpenBLAS of NumPy's wheels on the
matrices of a small GPT. MKL also adds to a result in place; NumPy has no function for that.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.ops.weightless import has_memory

ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112  # constants of the CBLAS interface


def put_product(a, b, out, accumulate, arena):
    """Write or add a b to out; BLAS reads strided views in place where it can.

    a: (M, K); b: (K, N); out: (M, N), all of one dtype
    """
    multiply = mkl().get(out.dtype)
    if (
        multiply
        and (order_a := _order(a))
        and (order_b := _order(b))
        and out.flags.c_contiguous
        and out.size
    ):
        if not has_memory(out):
            return
        multiply(
            ROW_MAJOR,
            order_a.how,
            order_b.how,
            *out.shape,
            a.shape[1],
            1,
            _address(a),
            order_a.stride,
            _address(b),
            order_b.stride,
            float(accumulate),
            _address(out),
            out.shape[1],
        )
    elif accumulate:
        out += np.matmul(a, b, out=arena.take(out.shape, out.dtype))
    else:
        np.matmul(a, b, out=out)


@cache
def mkl() -> dict[np.dtype, Callable]:
    """Return MKL's product for each dtype; empty if MKL is not installed or does not load."""
    try:
        paths = [
            file.locate() for file in files("mkl") or () if file.name.startswith("libmkl_rt.so")
        ]
        library = ctypes.CDLL(str(Path(paths[0]).resolve()))
    except (PackageNotFoundError, IndexError, OSError):
        return {}
    found: dict[np.dtype, Callable] = {}
    for dtype, scalar, function in (
        (np.float32, ctypes.c_float, library.cblas_sgemm),
        (np.float64, ctypes.c_double, library.cblas_dgemm),
    ):
        matrix: list[Any] = [ctypes.c_void_p, ctypes.c_int]
        function.argtypes = [*[ctypes.c_int] * 6, scalar, *matrix, *matrix, scalar, *matrix]
        function.restype = None
        found[np.dtype(dtype)] = function
    return found


class Order(NamedTuple):
    """The layout of a matrix for BLAS: transpose flag and leading dimension.

    how     AS_IT_IS or TRANSPOSED
    stride  stride of the rows, or of the columns if transposed, in elements
    """

    how: int
    stride: int


def _order(matrix: np.ndarray) -> Order | None:
    """Return the layout of a matrix; None if BLAS cannot read it in place."""
    if not matrix.size:
        return None
    (rows, columns), (down, across), item = matrix.shape, matrix.strides, matrix.itemsize
    if across == item and down >= columns * item and down % item == 0:
        return Order(AS_IT_IS, down // item)
    if down == item and across >= rows * item and across % item == 0:
        return Order(TRANSPOSED, across // item)
    return None


def _address(matrix: np.ndarray) -> int:
    return matrix.__array_interface__["data"][0]
