"""Attention with several documents in a row and within a window, on kernels."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.machine.backend import Arena
from tests.cases.layers import CAPPED, reference
from tests.cases.numbers import assert_close, numbers, stored, values
from tests.cases.packed import Packed, on

DROP = (5, 2**40 + 3), 2**35 + 1, 2**20 + 3, 4, 0.3


OFFSETS = 0, 1000, 40
"""The causal mask, none, and one that hides some later keys."""


def starts_of(rows: list[list[int]]) -> np.ndarray:
    """Return the first token of each token's document, from the lengths of each row's documents."""
    return np.array([np.repeat(np.cumsum([0, *row[:-1]]), row) for row in rows], np.int32)


def check_documents(
    kernels: Kernels,
    rows: list[list[int]],
    h: int,
    d: int,
    dtype: str = "float32",
    drops: bool = False,
    g: int | None = None,
    tensor_cores: str = "mma",
    **bounds: float,
) -> None:
    """Compare attention within documents, forward and backward.    rows: none with one document each"""
    arena, starts = Arena(), starts_of(rows)
    shape = starts.shape
    packed = {"starts": starts} if max(map(len, rows)) > 1 or "window" not in bounds else {}
    qkv, dy = (stored(numbers(n, *shape, n * d), dtype) for n in (h + 2 * (g or h), h))
    name, given = ("attention_dropout", DROP) if drops else ("attention", ())
    on_kernels = on(kernels, dtype, tensor_cores)
    ops, truth = (Packed(each, name, g, **bounds) for each in (on_kernels, reference))
    y, saved = ops.attention(qkv, h, *given, arena, **packed)
    true_y, true_saved = truth.attention(values(qkv), h, *given, None, **packed)
    assert_close(y, true_y, dtype, "y")
    assert_close(
        ops.attention_backward(dy, saved, arena),
        truth.attention_backward(values(dy), true_saved, None),
        dtype,
        "dqkv",
    )


def whole_documents() -> Iterator[Callable]:
    """attention."""
    for rows in (
        [[1]],
        [[2, 3], [5]],
        [[32, 1], [31, 2]],
        [[1] * 33],
        [[64, 33], [33, 64], [3, 90, 4]],
        [[63, 3]],
        [[60, 4]],
        [[20, 100, 76]],  # a tile with two borders, and one without
    ):
        for offset in OFFSETS:
            yield partial(check_documents, rows=rows, h=2, d=4, offset=offset)
    for dtype in ("float64", "bfloat16"):
        yield partial(check_documents, rows=[[7, 33]], h=1, d=8, dtype=dtype)
    yield partial(check_documents, rows=[[40, 30]], h=2, g=1, d=4)


def windows() -> Iterator[Callable]:
    """attention."""
    for rows in ([[1]], [[33], [33]], [[97]], [[200]], [[64, 33], [33, 64]]):
        for window in (1, 2, 32, 33, 63, 64, 65, 100, 1000):
            yield partial(check_documents, rows=rows, h=2, d=4, window=window)
    for dtype in ("float64", "bfloat16"):
        yield partial(check_documents, rows=[[40]], h=1, d=8, dtype=dtype, window=7)
    yield partial(check_documents, rows=[[170]], h=2, g=1, d=4, window=40)


def dropped_windows() -> Iterator[Callable]:
    """attention_dropout."""
    for rows in ([[97], [97]], [[40, 57], [90, 7]]):
        yield partial(check_documents, rows=rows, h=2, d=4, drops=True, window=33)


def tensor_windows() -> Iterator[Callable]:
    """attention_tensor and attention_tensor_backward."""
    for rows in ([[1]], [[130], [130]], [[400]], [[300, 100]]):
        for window in (1, 16, 64, 65, 127, 128, 129, 300):
            yield partial(check_documents, rows=rows, h=1, d=16, dtype="float16", window=window)
    yield partial(check_documents, rows=[[300]], h=1, d=80, dtype="3xtf32", window=100, **CAPPED)
    yield partial(check_documents, rows=[[200]], h=2, g=1, d=16, dtype="float16", window=70)
    yield partial(check_documents, rows=[[160]], h=2, d=64, dtype="float16", window=40)


def dropped_documents() -> Iterator[Callable]:
    """attention_dropout."""
    for offset in OFFSETS:
        yield partial(
            check_documents, rows=[[40, 57], [90, 7]], h=2, d=4, drops=True, offset=offset
        )


def tensor_documents() -> Iterator[Callable]:
    """attention_tensor and attention_tensor_backward."""
    for rows in (
        [[1]],
        [[2, 3], [5]],
        [[64, 66], [63, 67]],
        [[1] * 40],
        [[120, 9, 141, 10]],  # the last tile has a border too
        [[127, 3]],
        [[100, 300], [300, 100], [129, 271]],  # steps with and without masks in turn
    ):
        for offset in OFFSETS:
            yield partial(check_documents, rows=rows, h=1, d=16, dtype="float16", offset=offset)
    for offset, dtype in zip(OFFSETS, ("bfloat16", "3xtf32"), strict=False):
        yield partial(check_documents, rows=[[50, 150]], h=1, d=80, dtype=dtype, offset=offset)
    yield partial(
        check_documents, rows=[[100, 60]], h=2, g=1, d=16, dtype="float16", offset=OFFSETS[1]
    )
    yield partial(check_documents, rows=[[100, 31]], h=2, d=64, dtype="float16")
