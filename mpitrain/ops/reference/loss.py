"""The definition of the operations on logits: loss, gradient and accuracy, whole or split.

A split vocabulary is Megatron's vocabulary-parallel cross-entropy: each rank has a slice of the
columns. The caller reduces (M,) or (2, M) numbers over the slices between the operations:

    cross_entropy:  row_maximum -> max -> row_exponentials -> sum -> cross_entropy_split
    count_correct:  row_maximum -> max -> row_argmax -> max -> count_correct_split

A row with the target IGNORED adds nothing to a loss or a count, and its gradient is 0. Losses of
numbers (`squared_error` and below) have NaN in its place.
"""

import numpy as np

from mpitrain.data.source import IGNORED
from mpitrain.ops.reference.layers import into
from mpitrain.ops.table import operation


@operation("logits:M,V targets<V:M scale=0.125 -> loss dlogits:M,V", "dlogits", launches=3)
def cross_entropy(logits, targets, scale, arena, smoothing=0.0):
    """Return (loss_sum, dlogits); dlogits is written over `logits`.

    loss_sum is the sum over rows of -log(probability of the target).
    logits     (M, V)
    targets    (M,)
    scale      factor of dlogits, not of loss_sum: `weight_of` the targets of the whole update (in
               parallel/replica.py), times the loss scale
    smoothing  part of a target that all entries share equally (Szegedy et al. 2016, section 7)
    """
    loss_sum = cross_entropy_loss(logits, targets, arena)
    if smoothing:
        rows = counted_rows(targets)
        shifted = logits[rows] - logits[rows, targets[rows]][:, None]
        loss_sum -= smoothing * float(shifted.mean(-1, dtype=np.float64).sum())
    logits -= logits.max(-1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(-1, keepdims=True)
    rows = counted_rows(targets)
    logits[rows, targets[rows]] -= 1 - smoothing
    if smoothing:
        logits -= smoothing / logits.shape[-1]
    logits *= scale
    logits[targets == IGNORED] = 0
    return loss_sum, logits


@operation("logits:M,V targets<V:M -> loss", "nothing", launches=3)
def cross_entropy_loss(logits, targets, arena):
    """Return only loss_sum, for evaluation; logits do not change."""
    shifted = (logits - logits.max(-1, keepdims=True)).astype(np.float64)
    log_sum, rows = np.log(np.exp(shifted).sum(-1)), counted_rows(targets)
    return float((log_sum[rows] - shifted[rows, targets[rows]]).sum())


@operation("logits:M,V targets<V:M -> count", "nothing", launches=3)
def count_correct(logits, targets, arena):
    """Return the number of rows that have their largest logit at the target."""
    return int((logits.argmax(-1) == targets).sum())


@operation("logits:M,V -> maxima:M", "nothing")
def row_maximum(logits, arena, out=None):
    """Return maxima: the largest logit of each row, to be maximised over the slices by the caller.

    logits: (M, V), the columns of this slice; maxima: (M,), -inf if there are no columns
    """
    return into(out, logits.max(-1, initial=-np.inf))


@operation("logits:M,V targets<V:M first=0 maxima@row_maximum|M -> facts:2,M", "nothing")
def row_exponentials(logits, targets, first, maxima, arena, out=None, smoothing=0.0, share=0.0):
    """Return facts, to be summed over the slices; may overwrite the logits with data for
    `cross_entropy_split`.

    logits     (M, V), the columns of this slice
    targets    (M,), indices in the whole vocabulary
    maxima     (M,), of whole rows
    facts      (2, M): each row's sum of exp(logit - maximum); its target's logit - maximum, or 0 if
               the target is in another slice. With smoothing the latter is the mean of these
               differences over the smoothed target: (1 - smoothing) of it + share of each entry's
    smoothing  as of `cross_entropy`
    share      smoothing / entries of the whole vocabulary
    """
    rows, columns = columns_of(targets, first, logits)
    logits -= maxima[:, None]
    facts = np.zeros((2, len(logits)), logits.dtype)
    facts[1] = share * logits.sum(-1) if share else 0
    facts[1, rows] += (1 - smoothing) * logits[rows, columns]
    np.exp(logits, out=logits)
    facts[0] = logits.sum(-1)
    return into(out, facts)


@operation(
    "logits:M,V targets<V:M first=0 maxima@row_maximum|M facts@row_exponentials|2,M "
    "scale=0.125 -> loss dlogits:M,V",
    "dlogits",
    launches=3,
)
def cross_entropy_split(
    logits, targets, first, maxima, facts, scale, arena, smoothing=0.0, share=0.0
):
    """Return (loss_sum, dlogits) as `cross_entropy`, on the columns of this slice.

    dlogits is written over `logits`. loss_sum is the loss of whole rows, with the same bits on
    every slice: do not sum it.
    logits: (M, V), as `row_exponentials` left them; maxima: (M,); facts: (2, M), summed over the
    slices; smoothing, share: as of `row_exponentials`
    """
    rows, columns = columns_of(targets, first, logits)
    total, at_target = facts
    logits /= total[:, None]
    logits[rows, columns] -= 1 - smoothing
    logits -= share
    logits *= scale
    logits[targets == IGNORED] = 0
    losses = np.log(total, dtype=np.float64) - at_target
    return float(losses[counted_rows(targets)].sum()), logits


@operation("logits:M,V first=0 maxima@row_maximum|M -> places:M", "nothing")
def row_argmax(logits, first, maxima, arena, out=None):
    """Return places: minus the lowest index with the row's largest logit.

    The caller takes the maximum of places over the slices. Indices are in the whole vocabulary. A
    NaN is larger than any number. float32 distinguishes the first 2^24 entries of a vocabulary.
    logits: (M, V); maxima: (M,), of whole rows
    places: (M,), -inf for a row with its largest logit in another slice
    """
    entries = first + np.arange(logits.shape[-1], dtype=logits.dtype)
    is_largest = (logits == maxima[:, None]) | np.isnan(logits)
    return into(
        out, np.where(is_largest, -entries, -np.inf).max(-1, initial=-np.inf).astype(logits.dtype)
    )


@operation("places@row_argmax|M targets<V:M -> count", "nothing", launches=3)
def count_correct_split(places, targets, arena):
    """Return the result of `count_correct`, from the maximum of `row_argmax` over the slices.

    places, targets: (M,)
    """
    return int((-places == targets).sum())


@operation("predictions:L targets:L scale=0.125 -> loss dpredictions:L", "dpredictions", launches=3)
def squared_error(predictions, targets, scale, arena):
    """Return (loss_sum, dpredictions): the sum of (prediction - target)^2, and its gradient.

    dpredictions is written over `predictions`. A target NaN does not count.
    predictions, targets  equally many numbers, of any shape
    scale                 factor of dpredictions, as of `cross_entropy`
    """
    error = predictions.reshape(-1) - targets.reshape(-1)
    return _of_numbers(predictions, targets, scale, error**2, 2 * error)


@operation("predictions:L targets:L scale=0.125 -> loss dpredictions:L", "dpredictions", launches=3)
def absolute_error(predictions, targets, scale, arena):
    """Return the sum of |prediction - target| as `squared_error`; the gradient at 0 is 0."""
    error = predictions.reshape(-1) - targets.reshape(-1)
    return _of_numbers(predictions, targets, scale, np.abs(error), np.sign(error))


@operation("predictions:L targets:L scale=0.125 -> loss dpredictions:L", "dpredictions", launches=3)
def binary_cross_entropy(predictions, targets, scale, arena):
    """Return the sum of -log(probability of the target) as `squared_error`.

    predictions  logits: the probability of 1 is 1 / (1 + exp(-logit))
    targets      from 0 to 1
    """
    x, y = predictions.reshape(-1), targets.reshape(-1)
    power = np.exp(-np.abs(x))
    loss = np.maximum(x, 0) - x * y + np.log1p(power)
    return _of_numbers(
        predictions, targets, scale, loss, np.where(x < 0, power, 1) / (1 + power) - y
    )


def _of_numbers(predictions, targets, scale, losses, gradient):
    counted = ~np.isnan(targets.reshape(-1))
    predictions[...] = np.where(counted, scale * gradient, 0).reshape(predictions.shape)
    return float(np.sum(losses, where=counted, dtype=np.float64)), predictions


def counted_rows(targets):
    """Return the numbers of the rows that count, ascending.    targets: (M,)"""
    return np.flatnonzero(targets != IGNORED)


def columns_of(targets, first, logits):
    """Return (rows, columns) of the targets in these columns."""
    rows = np.flatnonzero((targets >= first) & (targets < first + logits.shape[-1]))
    return rows, targets[rows] - first
