"""Matrix products: by NumPy's BLAS, or by Intel's MKL where that is chosen (`machine/blas_kernels.py`).

On the matrices of a small GPT, MKL is 10 to 15% faster than the OpenBLAS of NumPy's wheels. That
holds for Intel processors with AVX-512; on AMD's it may take twice as long. Both libraries can add
to a result in place. NumPy has no function for that, so short sums call its OpenBLAS directly.
"""

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_info

from mpitrain.machine import process
from mpitrain.machine.backend import has_memory, host_address
from mpitrain.machine.blas_kernels import in_use, mkl_file

ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112  # constants of the CBLAS interface
Pair = tuple[int, int]
ONE_SUM = 1024
"""Bytes of a column of K numbers that OpenBLAS sums without a break, on every processor.

Such a sum is added to a result in place, with the bits of a product and an addition.
"""


def put_product(a, b, out, accumulate, arena, products=None):
    """Write or add a b to out; BLAS reads strided views in place where it can.

    a: (M, K); b: (K, N); out: (M, N), all of one dtype
    products  as of `installed_mkl`; None: MKL's, where it multiplies
    """
    products = products or mkl()
    if not products and accumulate and a.shape[1] * out.itemsize <= ONE_SUM:
        products = numpy_blas()
    if products and (multiply := products.get(out.dtype)):
        layout = arguments(a.shape, b.shape, a.strides, b.strides, out.strides, out.itemsize)
        if layout:
            if has_memory(out):
                sizes, stride_a, stride_b, stride_out = layout
                multiply(
                    *sizes,
                    1,
                    host_address(a),
                    stride_a,
                    host_address(b),
                    stride_b,
                    accumulate,
                    host_address(out),
                    stride_out,
                )
            return
    if accumulate:
        out += np.matmul(a, b, out=arena.take(out.shape, out.dtype))
    else:
        np.matmul(a, b, out=out)


@cache
def mkl() -> dict[np.dtype, Callable]:
    """Return MKL's product for each dtype where it multiplies; else empty."""
    return installed_mkl() if process.blas_kernels() == process.MKL else {}


@cache
def installed_mkl() -> dict[np.dtype, Callable]:
    """Return MKL's product for each dtype; empty if MKL is not installed or does not load."""
    try:
        library = ctypes.CDLL(str(mkl_file() or ""))
        return _products(library.cblas_sgemm, library.cblas_dgemm, ctypes.c_int)
    except (AttributeError, OSError):
        return {}


def multiplier() -> str:
    return "MKL" if mkl() else f"NumPy {in_use()[1]}".strip()


@cache
def numpy_blas() -> dict[np.dtype, Callable]:
    """Return the product of the OpenBLAS in NumPy's wheels for each dtype; empty for another BLAS.

    Its integers have 64 bits, as the suffix of its names says.
    """
    for pool in threadpool_info():
        library = ctypes.CDLL(pool["filepath"])
        if pool["internal_api"] == "openblas" and hasattr(library, "scipy_cblas_sgemm64_"):
            single, double = library.scipy_cblas_sgemm64_, library.scipy_cblas_dgemm64_
            return _products(single, double, ctypes.c_int64)
    return {}


def _products(single: Any, double: Any, integer: type) -> dict[np.dtype, Callable]:
    """Return cblas_sgemm and cblas_dgemm by dtype, with the types of their arguments."""
    products: dict[np.dtype, Callable] = {}
    for dtype, scalar, function in (
        (np.float32, ctypes.c_float, single),
        (np.float64, ctypes.c_double, double),
    ):
        matrix: list[Any] = [ctypes.c_void_p, integer]
        sizes = [*[ctypes.c_int] * 3, *[integer] * 3]
        function.argtypes = [*sizes, scalar, *matrix, *matrix, scalar, *matrix]
        function.restype = None
        products[np.dtype(dtype)] = function
    return products


class Arguments(NamedTuple):
    """The arguments of a product that depend only on shapes and strides.

    sizes  order, transpose flags, M, N and K
    a, b, out  leading dimension of each matrix, in elements
    """

    sizes: tuple[int, ...]
    a: int
    b: int
    out: int


@lru_cache(1024)
def arguments(
    shape_a: Pair, shape_b: Pair, strides_a: Pair, strides_b: Pair, strides_out: Pair, item: int
) -> Arguments | None:
    """Return the arguments of BLAS; None if it cannot read or write a matrix in place.

    strides, item  in bytes; the result is (rows of a, columns of b)
    """
    (count, inner), columns = shape_a, shape_b[1]
    order_a, order_b = _order(shape_a, strides_a, item), _order(shape_b, strides_b, item)
    if not (order_a and order_b) or strides_out != (columns * item, item):
        return None
    (how_a, a), (how_b, b) = order_a, order_b
    return Arguments((ROW_MAJOR, how_a, how_b, count, columns, inner), a, b, columns)


def _order(shape: Pair, strides: Pair, item: int) -> tuple[int, int] | None:
    """Return the transpose flag and the leading dimension of a matrix, in elements.

    None: BLAS cannot read it in place.
    """
    (rows, columns), (down, across) = shape, strides
    if not rows * columns:
        return None
    if across == item and down >= columns * item and down % item == 0:
        return AS_IT_IS, down // item
    if down == item and across >= rows * item and across % item == 0:
        return TRANSPOSED, across // item
    return None
