"""Softmax cross-entropy, and counting correct predictions.

M rows, V entries of the vocabulary (or of a slice of it), or classes. `ops/reference/loss.py`
defines maxima, facts and places, the numbers of a split vocabulary.
"""

import numpy as np

from mpitrain.data.source import IGNORED
from mpitrain.machine.backend import has_memory
from mpitrain.ops.host.product import row_blocks


def cross_entropy(logits, targets, scale, arena, smoothing=0.0):
    loss_sum, share = 0.0, smoothing / logits.shape[1]
    for rows in row_blocks(logits):
        block, target = logits[rows], targets[rows]
        loss_sum += _exponentiate(block, target, smoothing)
        inverse = np.divide(scale, block.sum(1, keepdims=True))
        block *= inverse
        counted = np.flatnonzero(target != IGNORED)
        block[counted, target[counted]] -= scale * (1 - smoothing)
        if smoothing:
            block -= scale * share
        block[target == IGNORED] = 0
    return loss_sum, logits


def cross_entropy_loss(logits, targets, arena):
    loss_sum = 0.0
    for rows in row_blocks(logits):
        block = arena.take(logits[rows].shape, logits.dtype)
        block[...] = logits[rows]
        loss_sum += _exponentiate(block, targets[rows])
    return loss_sum


def row_maximum(logits, arena, out=None):
    return logits.max(
        1, initial=-np.inf, out=arena.take((len(logits),), logits.dtype) if out is None else out
    )


def row_exponentials(logits, targets, first, maxima, arena, out=None, smoothing=0.0, share=0.0):
    """Return `facts`. The logits become exp(logit - maximum), so the gradient needs no second exp.

    logits: (M, V); facts: (2, M)
    """
    rows, columns = _columns_of(targets, first, logits)
    facts = arena.take((2, len(logits)), logits.dtype) if out is None else out
    facts.fill(0)
    if share:
        facts[1] = share * (logits.sum(1) - logits.shape[1] * maxima)
    if has_memory(logits):  # Else every target's page would be mapped, to read nothing.
        facts[1, rows] += (1 - smoothing) * (logits[rows, columns] - maxima[rows])
    for some in row_blocks(logits):
        block = logits[some]
        block -= maxima[some, None]
        np.exp(block, out=block)
        np.sum(block, axis=1, out=facts[0, some])
    return facts


def cross_entropy_split(
    logits, targets, first, maxima, facts, scale, arena, smoothing=0.0, share=0.0
):
    rows, columns = _columns_of(targets, first, logits)
    total, at_target = facts
    logits *= np.divide(scale, total)[:, None]
    if has_memory(logits):
        logits[rows, columns] -= scale * (1 - smoothing)
    if share:
        logits -= scale * share
    logits[targets == IGNORED] = 0
    losses = np.log(total, dtype=np.float64) - at_target
    return float(np.sum(losses[targets != IGNORED])), logits


def row_argmax(logits, first, maxima, arena, out=None):
    places = arena.take((len(logits),), logits.dtype) if out is None else out
    if not logits.size:
        places.fill(-np.inf)
        return places
    columns = logits.argmax(1)
    largest = logits[np.arange(len(logits)), columns]
    places[...] = np.where((largest == maxima) | np.isnan(largest), -(first + columns), -np.inf)
    return places


def _columns_of(targets, first, logits):
    """Return (rows, columns) of the targets in these columns."""
    rows = np.flatnonzero((targets >= first) & (targets < first + logits.shape[1]))
    return rows, targets[rows] - first


def _exponentiate(block, target, smoothing=0.0):
    """Replace logits by exp(logit - row maximum), and return the sum of -log(probability of the
    smoothed target).

    block: (rows, V); target: (rows,)
    """
    block -= block.max(1, keepdims=True)
    counted = np.flatnonzero(target != IGNORED)
    at_target = block[counted, target[counted]]
    if smoothing:
        at_target *= 1 - smoothing
        at_target += smoothing * block.mean(1)[counted]
    np.exp(block, out=block)
    return float(np.sum(np.log(block.sum(1, dtype=np.float64))[counted] - at_target))
