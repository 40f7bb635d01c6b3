"""The meaning of the operations on logits: the loss and its gradient, what is right, and both for a vocabulary in parts."""

import numpy as np

from mpitrain.ops.reference.layers import into


def cross_entropy(logits, targets, scale, arena):
    """(loss_sum, dlogits): minus the log-probability of the targets, and its gradient written over `logits`.

    logits: (M, V); targets: (M,); dlogits is `logits` itself
    scale: 1 / rows of the whole update, the one place where the mean is taken; it multiplies dlogits, not loss_sum
    """
    loss_sum = cross_entropy_loss(logits, targets, arena)
    logits -= logits.max(-1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(-1, keepdims=True)
    logits[np.arange(len(targets)), targets] -= 1
    logits *= scale
    return loss_sum, logits


def cross_entropy_loss(logits, targets, arena):
    """loss_sum alone, for evaluation; logits stay as they are."""
    shifted = (logits - logits.max(-1, keepdims=True)).astype(np.float64)
    log_sum = np.log(np.exp(shifted).sum(-1))
    return float((log_sum - shifted[np.arange(len(targets)), targets]).sum())


def count_correct(logits, targets, arena):
    """How many rows have their largest logit at the target."""
    return int((logits.argmax(-1) == targets).sum())


def row_maximum(logits, arena, out=None):
    """maxima: the largest logit of each row, for a maximum over the parts of a split vocabulary.

    logits: (M, V), the columns of this part; maxima: (M,), -inf without columns
    In place of `cross_entropy`: `row_maximum`, a maximum over the parts, `row_exponentials`, a sum over the parts,
    `cross_entropy_split`. In place of `count_correct`: `row_maximum`, a maximum, `row_argmax`, a maximum,
    `count_correct_split`. The reductions are the caller's.
    """
    return into(out, logits.max(-1, initial=-np.inf))


def row_exponentials(logits, targets, first, maxima, arena, out=None):
    """facts, for a sum over the parts; may overwrite the logits with what `cross_entropy_split` wants to find there.

    logits: (M, V); targets: (M,), of the whole vocabulary; maxima: (M,), of whole rows
    facts: (2, M), each row's sum of exp(logit - maximum), and its target's logit - maximum or 0 in another part
    """
    rows, columns = _held(targets, first, logits)
    logits -= maxima[:, None]
    facts = np.zeros((2, len(logits)), logits.dtype)
    facts[1, rows] = logits[rows, columns]
    np.exp(logits, out=logits)
    facts[0] = logits.sum(-1)
    return into(out, facts)


def cross_entropy_split(logits, targets, first, maxima, facts, scale, arena):
    """As `cross_entropy`, on the columns of this part: (loss_sum, dlogits), dlogits written over `logits`.

    logits: (M, V), as `row_exponentials` left them; maxima: (M,); facts: (2, M), the sum over the parts
    loss_sum is that of whole rows, on every part the same bits, and no part of a sum
    """
    rows, columns = _held(targets, first, logits)
    total, at_target = facts
    logits /= total[:, None]
    logits[rows, columns] -= 1
    logits *= scale
    return float((np.log(total, dtype=np.float64) - at_target).sum()), logits


def row_argmax(logits, first, maxima, arena, out=None):
    """places: minus the lowest entry whose logit is its row's largest, for a maximum over the parts.

    logits: (M, V); maxima: (M,), of whole rows; places: (M,), -inf for a row whose largest logit is in other parts
    A NaN is the largest of all. float32 tells apart the first 2^24 entries of a vocabulary.
    """
    entries = first + np.arange(logits.shape[-1], dtype=logits.dtype)
    is_largest = (logits == maxima[:, None]) | np.isnan(logits)
    return into(
        out, np.where(is_largest, -entries, -np.inf).max(-1, initial=-np.inf).astype(logits.dtype)
    )


def count_correct_split(places, targets, arena):
    """As `count_correct`, from the maximum of `row_argmax` over the parts.    places, targets: (M,)"""
    return int((-places == targets).sum())


def _held(targets, first, logits):
    """(rows, columns) of the targets that these columns hold."""
    rows = np.flatnonzero((targets >= first) & (targets < first + logits.shape[-1]))
    return rows, targets[rows] - first
