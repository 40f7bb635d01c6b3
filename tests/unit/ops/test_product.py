"""Matrix products mean the same by NumPy's BLAS and by MKL, where it is installed."""

import numpy as np
import pytest

from mpitrain.machine import process
from mpitrain.machine.backend import Arena
from mpitrain.ops.host import product

LIBRARIES = [
    pytest.param(dict, id="numpy"),
    pytest.param(
        product.installed_mkl,
        id="mkl",
        marks=pytest.mark.skipif(not product.installed_mkl(), reason="MKL is not installed"),
    ),
]


@pytest.fixture(params=LIBRARIES)
def library(request, monkeypatch):
    monkeypatch.setattr(product, "mkl", request.param)


def views(shape, dtype):
    """A matrix of this shape, laid out in every way that callers use, and in one that BLAS cannot read."""
    values = np.random.default_rng(shape).standard_normal(shape).astype(dtype)
    rows, columns = shape
    wide, sparse = np.zeros((rows, columns + 3), dtype), np.zeros((rows, 2 * columns), dtype)
    wide[:, :columns], sparse[:, ::2] = values, values
    return [values, values.T.copy().T, wide[:, :columns], sparse[:, ::2]]


@pytest.mark.product
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(1, 1, 1), (3, 1, 5), (7, 5, 1), (1, 6, 4), (33, 17, 65), (0, 3, 2), (2, 0, 3)],
)
def test_a_product_is_written_or_added(library, dtype, m, k, n):
    for a in views((m, k), dtype):
        for b in views((k, n), dtype):
            truth = a.astype(np.float64) @ b.astype(np.float64)
            for accumulate in (False, True):
                out = np.full((m, n), 2.0 if accumulate else np.nan, dtype)
                product.put_product(a, b, out, accumulate, Arena())
                error = np.abs(out - truth - 2 * accumulate).max(initial=0)
                assert error <= 1e2 * np.finfo(dtype).eps


@pytest.mark.skipif(not product.numpy_blas(), reason="NumPy has another BLAS")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_short_sum_is_added_in_place_bitwise(monkeypatch, dtype):
    monkeypatch.setattr(product, "mkl", dict)
    longest = product.ONE_SUM // np.dtype(dtype).itemsize
    draw = np.random.default_rng(0)
    for m, k, n in [(1, 1, 1), (65, 7, 33), (256, longest, 96), (100, longest - 1, 257)]:
        a, b, out = (draw.standard_normal(s).astype(dtype) for s in ((k, m), (k, n), (m, n)))
        expected = out + a.T @ b
        arena = Arena()
        product.put_product(a.T, b, out, True, arena)
        assert np.array_equal(out, expected) and arena.allocations == 0
    arena = Arena()
    a, b = np.ones((m, longest + 1), dtype), np.ones((longest + 1, n), dtype)
    product.put_product(a, b, out, True, arena)
    assert arena.allocations == 1


def test_mkl_is_used_where_it_is_chosen(monkeypatch):
    calls = []
    monkeypatch.setattr(
        product, "mkl", lambda: {np.dtype("float32"): lambda *arguments: calls.append(arguments)}
    )
    a, b, out = (
        np.ones((2, 3), np.float32),
        np.ones((4, 3), np.float32).T,
        np.zeros((2, 4), np.float32),
    )
    product.put_product(a, b, out, True, Arena())
    ((order, how_a, how_b, m, n, k, alpha, _, stride_a, _, stride_b, beta, _, stride),) = calls
    assert (order, how_a, how_b, m, n, k) == (101, 111, 112, 2, 4, 3)
    assert (alpha, beta, stride_a, stride_b, stride) == (1, 1.0, 3, 3, 4)


@pytest.mark.parametrize("by_mkl, is_used", [("1", True), ("0", False), ("", False)])
def test_installing_mkl_does_not_choose_it(by_mkl, is_used, monkeypatch):
    monkeypatch.setattr(product, "installed_mkl", lambda: {"float32": print})
    monkeypatch.setenv(process.BY_MKL, by_mkl)
    assert bool(product.mkl.__wrapped__()) == is_used


@pytest.mark.parametrize("path", [None, "/dev/null"])
def test_without_mkl_there_is_none(path, monkeypatch):
    monkeypatch.setattr(product, "mkl_file", lambda: path)
    assert product.installed_mkl.__wrapped__() == {}
