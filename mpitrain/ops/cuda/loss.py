"""Softmax cross-entropy and losses of numbers on the device.

Losses are summed on the device. The host synchronizes with the device only when it reads the sum.
The row stride of the logits may exceed the row length, since `logits` of layers.py pads rows.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.launches import (
    INDEXED,
    KINDS,
    POINTWISE,
    SCRATCH,
    WIDE_ROWS,
    blocks,
    most_shared,
    sum_all,
)

ANY = np.dtype(np.int64)  # the dtype of targets for kernels that take none
REGISTERS = 64  # the most registers per thread of kernels whose blocks may have 1024 threads


def cross_entropy(kernels, logits, targets, scale, arena, smoothing=0.0):
    losses, row = (
        arena.take((len(logits),), KINDS[logits.dtype].sums),
        logits.shape[1] * logits.itemsize,
    )
    keep = row <= most_shared(kernels) - SCRATCH
    _launch(
        kernels,
        "cross_entropy",
        logits,
        (int(keep), targets, scale, smoothing, smoothing / logits.shape[1], logits, losses),
        targets.dtype,
        "losses",
        row * keep,
    )
    return sum_all(kernels, losses, arena), logits


def cross_entropy_loss(kernels, logits, targets, arena):
    losses = arena.take((len(logits),), KINDS[logits.dtype].sums)
    _launch(
        kernels, "cross_entropy_loss", logits, (targets, logits, losses), targets.dtype, "losses"
    )
    return sum_all(kernels, losses, arena)


def count_correct(kernels, logits, targets, arena):
    correct = arena.take((len(logits),), KINDS[logits.dtype].sums)
    _launch(
        kernels, "largest_is_target", logits, (targets, logits, correct), targets.dtype, "correct"
    )
    return sum_all(kernels, correct, arena)


def row_maximum(kernels, logits, arena, out=None):
    maxima = arena.take((len(logits),), KINDS[logits.dtype].sums) if out is None else out
    _launch(kernels, "row_maximum", logits, (logits, maxima), ANY, "maxima")
    return maxima


def row_exponentials(
    kernels, logits, targets, first, maxima, arena, out=None, smoothing=0.0, share=0.0
):
    facts = arena.take((2, len(logits)), KINDS[logits.dtype].sums) if out is None else out
    _launch(
        kernels,
        "row_exponentials",
        logits,
        (first, targets, smoothing, share, logits, maxima, facts[0], facts[1]),
        targets.dtype,
        "sums target_logits",
    )
    return facts


def cross_entropy_split(
    kernels, logits, targets, first, maxima, facts, scale, arena, smoothing=0.0, share=0.0
):
    losses = arena.take((len(logits),), KINDS[logits.dtype].sums)
    _launch(
        kernels,
        "cross_entropy_split",
        logits,
        (first, targets, scale, smoothing, share, maxima, facts[0], facts[1], logits, losses),
        targets.dtype,
        "losses",
    )
    return sum_all(kernels, losses, arena), logits


def row_argmax(kernels, logits, first, maxima, arena, out=None):
    places = arena.take((len(logits),), KINDS[logits.dtype].sums) if out is None else out
    _launch(kernels, "row_argmax", logits, (first, logits, maxima, places), ANY, "places")
    return places


def count_correct_split(kernels, places, targets, arena):
    correct = arena.take(places.shape, places.dtype)
    kernels.launch(
        "place_is_target",
        blocks(places.size),
        POINTWISE,
        (places.size, targets, places, correct),
        macros=INDEXED[places.dtype, targets.dtype],
        fresh="correct",
    )
    return sum_all(kernels, correct, arena)


def _loss_of_numbers(kind: int) -> Callable[..., Any]:
    """Return the operation of one `kind` of number_loss in cross_entropy.cu; arrays are contiguous."""

    def operation(kernels: Kernels, predictions, targets, scale, arena):
        losses = arena.take((predictions.size,), KINDS[predictions.dtype].sums)
        kernels.launch(
            "number_loss",
            blocks(predictions.size),
            POINTWISE,
            (predictions.size, kind, targets, scale, predictions, losses),
            macros=INDEXED[predictions.dtype, ANY],
            fresh="losses",
        )
        return sum_all(kernels, losses, arena), predictions

    return operation


squared_error, absolute_error, binary_cross_entropy = map(_loss_of_numbers, range(3))


def row_threads(kernels: Kernels, columns: int, shared: int) -> tuple[int]:
    """Return the threads of a block for rows of this length.

    If two blocks with half of the maximum fit a multiprocessor, it is half of the maximum: one
    block then writes a row while the other block reads one.
    shared  bytes of shared memory for the row
    """
    if columns <= 16 * POINTWISE[0]:
        return POINTWISE
    half = WIDE_ROWS[0] // 2
    both = kernels.engine.multiprocessor.resident(half, REGISTERS, shared + SCRATCH) >= 2
    return (half,) if both else WIDE_ROWS


def _launch(
    kernels: Kernels,
    name: str,
    logits: Any,
    rest: tuple,
    indices: np.dtype,
    fresh: str,
    shared: int = 0,
) -> None:
    """Launch one block per row.    rest: the arguments after M, V and the pitch"""
    rows, columns = logits.shape
    kernels.launch(
        name,
        (rows,),
        row_threads(kernels, columns, shared),
        (rows, columns, logits.strides[0] // logits.itemsize, *rest),
        shared,
        INDEXED[logits.dtype, indices],
        fresh,
        "logits",
    )
