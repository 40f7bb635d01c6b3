"""Softmax cross-entropy on the device.

Losses are summed on the device. The host synchronizes with the device only when it reads the sum.
The row stride of the logits may exceed the row length, since `linear.logits` pads rows.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.elements import INDEXED, KINDS
from mpitrain.ops.cuda.grids import POINTWISE, SCRATCH, WIDE_ROWS, blocks, most_shared
from mpitrain.ops.cuda.sums import sum_all

ANY = np.dtype(np.int64)  # the dtype of targets for kernels that take none
REGISTERS = 64  # the most registers per thread of kernels whose blocks may have 1024 threads


def cross_entropy(kernels: Kernels, logits, targets, scale, arena):
    """Return (loss_sum, dlogits); dlogits is written over the logits; loss_sum is an array without
    dims.
    """
    losses, row = (
        arena.take((len(logits),), KINDS[logits.dtype].sums),
        logits.shape[1] * logits.itemsize,
    )
    keep = row <= most_shared(kernels) - SCRATCH
    _launch(
        kernels,
        "cross_entropy",
        logits,
        (int(keep), targets, scale, logits, losses),
        targets.dtype,
        "losses",
        row * keep,
    )
    return sum_all(kernels, losses, arena), logits


def cross_entropy_loss(kernels: Kernels, logits, targets, arena):
    """Return only loss_sum, an array without dims."""
    losses = arena.take((len(logits),), KINDS[logits.dtype].sums)
    _launch(
        kernels, "cross_entropy_loss", logits, (targets, logits, losses), targets.dtype, "losses"
    )
    return sum_all(kernels, losses, arena)


def count_correct(kernels: Kernels, logits, targets, arena):
    """Return the number of rows with the largest logit at the target: an array without dims."""
    correct = arena.take((len(logits),), KINDS[logits.dtype].sums)
    _launch(
        kernels, "largest_is_target", logits, (targets, logits, correct), targets.dtype, "correct"
    )
    return sum_all(kernels, correct, arena)


def row_maximum(kernels: Kernels, logits, arena, out=None):
    """Return maxima (M,): the largest logit of each row among this rank's columns.

    The caller takes their maximum over the ranks that split the vocabulary.
    """
    maxima = arena.take((len(logits),), KINDS[logits.dtype].sums) if out is None else out
    _launch(kernels, "row_maximum", logits, (logits, maxima), ANY, "maxima")
    return maxima


def row_exponentials(kernels: Kernels, logits, targets, first, maxima, arena, out=None):
    """Return facts (2, M), which the caller sums over the ranks that split the vocabulary.

    They are each row's sum of exp(x - maximum), and its target's x - maximum (0 in another slice).
    """
    facts = arena.take((2, len(logits)), KINDS[logits.dtype].sums) if out is None else out
    _launch(
        kernels,
        "row_exponentials",
        logits,
        (first, targets, logits, maxima, facts[0], facts[1]),
        targets.dtype,
        "sums target_logits",
    )
    return facts


def cross_entropy_split(kernels: Kernels, logits, targets, first, maxima, facts, scale, arena):
    """Return (loss_sum, dlogits) as `cross_entropy`, over this slice's columns.

    facts is summed over the slices; loss_sum is the loss of whole rows.
    """
    losses = arena.take((len(logits),), KINDS[logits.dtype].sums)
    _launch(
        kernels,
        "cross_entropy_split",
        logits,
        (first, targets, scale, maxima, facts[0], facts[1], logits, losses),
        targets.dtype,
        "losses",
    )
    return sum_all(kernels, losses, arena), logits


def row_argmax(kernels: Kernels, logits, first, maxima, arena, out=None):
    """Return places (M,): minus the lowest index of each row's largest logit, or -inf.

    It is -inf if another rank has this logit. The caller takes the maximum over the ranks that
    split the vocabulary.
    """
    places = arena.take((len(logits),), KINDS[logits.dtype].sums) if out is None else out
    _launch(kernels, "row_argmax", logits, (first, logits, maxima, places), ANY, "places")
    return places


def count_correct_split(kernels: Kernels, places, targets, arena):
    """Return the number of rows with the largest logit at the target, an array without dims.

    places  (M,), minus the index of each row's largest logit: see `row_argmax`
    """
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
