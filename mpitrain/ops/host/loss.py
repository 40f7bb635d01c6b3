"""Softmax cross-entropy, and counting correct predictions. M rows, V vocabulary or classes."""

import numpy as np

from mpitrain.ops.host.blocks import row_blocks


def cross_entropy(logits, targets, scale, arena):
    """logits: (M, V), which become the gradient; targets: (M,)"""
    loss_sum = 0.0
    for rows in row_blocks(logits):
        block, target = logits[rows], targets[rows]
        loss_sum += _exponentiate(block, target)
        inverse = np.divide(scale, block.sum(1, keepdims=True))
        block *= inverse
        block[np.arange(len(block)), target] -= scale
    return loss_sum, logits


def cross_entropy_loss(logits, targets, arena):
    """logits: (M, V); targets: (M,)"""
    loss_sum = 0.0
    for rows in row_blocks(logits):
        block = arena.take(logits[rows].shape, logits.dtype)
        block[...] = logits[rows]
        loss_sum += _exponentiate(block, targets[rows])
    return loss_sum


def count_correct(logits, targets, arena):
    """logits: (M, V); targets: (M,)"""
    return int(np.count_nonzero(logits.argmax(1) == targets))


def _exponentiate(block, target):
    """Replace a block of logits by exp(logit - row maximum); returns its sum of -log(probability of the target).

    block: (rows, V); target: (rows,)
    """
    block -= block.max(1, keepdims=True)
    at_target = block[np.arange(len(block)), target]
    np.exp(block, out=block)
    return float(np.sum(np.log(block.sum(1, dtype=np.float64)) - at_target))
