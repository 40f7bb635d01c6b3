"""Matrix products, and the blocks of arrays that stay in cache between them; sums that BLAS computes.

Products are by NumPy's BLAS, or by Intel's MKL where that is chosen (`machine/blas_kernels.py`).

On the matrices of a small GPT, MKL is 10 to 15% faster than the OpenBLAS of NumPy's wheels. That
holds for Intel processors with AVX-512; on AMD's it may take twice as long. Both libraries can add
to a result in place. NumPy has no function for that, so short sums call its OpenBLAS directly.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_info

from mpitrain.machine import process
from mpitrain.machine.backend import WithoutMemory, has_memory, host_address
from mpitrain.machine.blas_kernels import mkl_file

ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112  # constants of the CBLAS interface
Pair = tuple[int, int]
ONE_SUM = 1024
"""Bytes of a column of K numbers that OpenBLAS sums without a break, on every processor.

Such a sum is added to a result in place, with the bits of a product and an addition.
"""


def put_product(a, b, out, accumulate, arena):
    """Write or add a b to out; BLAS reads strided views in place where it can.

    a: (M, K); b: (K, N); out: (M, N), all of one dtype
    """
    products = mkl()
    if accumulate and not products and a.shape[1] * out.itemsize <= ONE_SUM:
        products = numpy_blas()
    if products and put_in_place(a, b, out, accumulate, products):
        return
    if accumulate:
        out += np.matmul(a, b, out=arena.take(out.shape, out.dtype))
    else:
        np.matmul(a, b, out=out)


def put_in_place(a, b, out, accumulate, products):
    """Write or add a b to out by a library of `installed_mkl` or `numpy_blas`; return whether it can."""
    if not (multiply := products.get(out.dtype)):
        return False
    layout = arguments(a.shape, b.shape, a.strides, b.strides, out.strides, out.itemsize)
    if layout and has_memory(out):
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
    return bool(layout)


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
    return "MKL" if mkl() else f"NumPy {process.blas_kernels()}".strip()


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


# Bytes of one array in a block: a chain of operations needs four or five arrays in L2.
L2_SHARE = 256 * 1024
# OpenBLAS multiplies without packing up to this many multiplications.
UNPACKED = 1_000_000
# Elements between two rows of a transposed operand. Rows whose length is a power of 2 would share
# few sets of the L1 cache.
GAP = 16


class TileLimits(NamedTuple):
    """The largest sizes of a tile of attention; `long` is at least `short`.

    short  queries of the forward, keys of the backward: their results are sums over tiles
    long   keys of the forward, queries of the backward
    """

    short: int
    long: int


def tile_for(width: int) -> TileLimits:
    """Return the tile with the fastest products, for heads of this width."""
    return TileLimits(64, min(512, max(64, UNPACKED // (64 * (width + 1)) // 32 * 32)))


def take_columns(count, rows, columns, dtype, arena):
    """Lease arrays (count, rows, columns) with a gap after each row."""
    return arena.take((count, rows, columns + GAP), dtype)[:, :, :columns]


def rounds(starts: range, like: np.ndarray) -> range:
    """Return the starts of the rounds of a loop, but two at most if the arrays have no memory.

    Without memory only leases matter: every round after the second leases the same as the second.
    """
    return starts[:2] if isinstance(like, WithoutMemory) else starts


def row_blocks(x: np.ndarray, nbytes: int = L2_SHARE) -> Iterator[slice]:
    """Yield slices that cover the first dim of `x`, each of about `nbytes` and at least one row."""
    if rows := block_shape(x, nbytes)[0]:
        for start in rounds(range(0, len(x), rows), x):
            yield slice(start, min(start + rows, len(x)))


@lru_cache(256)
def constant(count: int, value: float, dtype: np.dtype) -> np.ndarray:
    """Return a read-only vector of one value, (count,); micro-batches share it."""
    vector = np.full(count, value, dtype)
    vector.flags.writeable = False
    return vector


def blocks_of(x: np.ndarray, *others: Any, nbytes: int = L2_SHARE) -> Iterator[tuple[Any, ...]]:
    """Yield (block of x, block of each other array) for the blocks of rows that `row_blocks` makes.

    An argument None stays None.
    """
    for rows in row_blocks(x, nbytes):
        yield tuple([one if one is None else one[rows] for one in (x, *others)])


def block_shape(x: np.ndarray, nbytes: int = L2_SHARE) -> tuple[int, ...]:
    """Return the shape of the largest block of `row_blocks`, for a scratch array of one block."""
    if x.nbytes <= nbytes:
        return x.shape if x.size else (0, *x.shape[1:])
    return max(1, nbytes // (x.nbytes // len(x))), *x.shape[1:]


def sum_rows(x, out, accumulate, arena):
    """Write or add the sum over rows of x (M, N) to out (N,).

    The sum is a product with ones, in which BLAS reads x once.
    """
    if accumulate and len(x) == 1:
        out += x[0]
        return
    total = out if not accumulate else arena.take(out.shape, out.dtype)
    np.matmul(constant(len(x), 1, x.dtype), x, out=total)
    if accumulate:
        out += total


# Row sums within these bounds have lost nothing to overflow or underflow, in float32 or float64.
SAFE = (1e-25, 1e25)


@lru_cache(64)
def causal_mask(count, dtype):
    """Return -inf for the keys after each query, else 0.    returns (count, count), read-only"""
    mask = np.triu(np.full((count, count), -np.inf, dtype), 1)
    mask.flags.writeable = False
    return mask


def split_heads(packed, parts, heads):
    """Return `parts` views (B, H, T, D) into (B, T, parts C)."""
    batch, length, channels = packed.shape
    width = channels // (parts * heads)
    return packed.reshape(batch, length, parts, heads, width).transpose(2, 0, 3, 1, 4)
