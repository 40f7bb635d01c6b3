"""Softmax cross-entropy. Losses are summed on the device: who needs the number waits for it, nobody else."""

from typing import Any

from mpitrain.kernels.arguments import fresh
from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.elements import element, index, sum_type
from mpitrain.ops.cuda.grids import POINTWISE, blocks
from mpitrain.ops.cuda.sums import sum_all


def cross_entropy(kernels: Kernels, logits, targets, scale, arena):
    """(loss_sum, dlogits), dlogits written over the logits; loss_sum is an array without dims."""
    losses = arena.take((len(logits),), sum_type(logits))
    kernels.launch("cross_entropy", (len(logits),), POINTWISE, (*logits.shape, targets, scale, logits, fresh(losses)),
                   **element(logits), **index(targets))
    return sum_all(kernels, losses, arena), logits


def cross_entropy_loss(kernels: Kernels, logits, targets, arena):
    """loss_sum alone."""
    return _row_total(kernels, "cross_entropy_loss", logits, targets, arena)


def count_correct(kernels: Kernels, logits, targets, arena):
    """How many rows have their largest logit at the target; an array without dims."""
    return _row_total(kernels, "largest_is_target", logits, targets, arena)


def row_maximum(kernels: Kernels, logits, arena, out=None):
    """The largest logit of each row, of the columns held here: (M,), for a maximum over the parts."""
    maxima = arena.take((len(logits),), sum_type(logits)) if out is None else out
    kernels.launch("row_maximum", (len(logits),), POINTWISE, (*logits.shape, logits, fresh(maxima)),
                   **element(logits), Index="long long")    # any: this kernel reads no targets
    return maxima


def row_exponentials(kernels: Kernels, logits, targets, first, maxima, arena, out=None):
    """(2, M): each row's sum of exp(x - maximum), and its target's x - maximum or 0, for a sum over the parts."""
    facts = arena.take((2, len(logits)), sum_type(logits)) if out is None else out
    kernels.launch("row_exponentials", (len(logits),), POINTWISE,
                   (*logits.shape, first, targets, logits, maxima, fresh(facts[0]), fresh(facts[1])),
                   **element(logits), **index(targets))
    return facts


def cross_entropy_split(kernels: Kernels, logits, targets, first, maxima, facts, scale, arena):
    """As `cross_entropy`, over the columns held here, from the sums over the parts; the loss is that of whole rows."""
    losses = arena.take((len(logits),), sum_type(logits))
    kernels.launch("cross_entropy_split", (len(logits),), POINTWISE,
                   (*logits.shape, first, targets, scale, maxima, facts[0], facts[1], logits, fresh(losses)),
                   **element(logits), **index(targets))
    return sum_all(kernels, losses, arena), logits


def row_argmax(kernels: Kernels, logits, first, maxima, arena, out=None):
    """Minus the lowest entry held here whose logit is its row's largest, or -inf: (M,), for a maximum over the parts."""
    places = arena.take((len(logits),), sum_type(logits)) if out is None else out
    kernels.launch("row_argmax", (len(logits),), POINTWISE, (*logits.shape, first, logits, maxima, fresh(places)),
                   **element(logits), Index="long long")    # any: this kernel reads no targets
    return places


def count_correct_split(kernels: Kernels, places, targets, arena):
    """How many rows have minus their target in `places`; an array without dims."""
    correct = arena.take(places.shape, places.dtype)
    kernels.launch("place_is_target", blocks(places.size), POINTWISE, (places.size, targets, places, fresh(correct)),
                   **element(places), **index(targets))
    return sum_all(kernels, correct, arena)


def _row_total(kernels: Kernels, name: str, logits: Any, targets: Any, arena: Any) -> Any:
    """The sum of one number a row."""
    rows = arena.take((len(logits),), sum_type(logits))
    kernels.launch(name, (len(logits),), POINTWISE, (*logits.shape, targets, logits, fresh(rows)),
                   **element(logits), **index(targets))
    return sum_all(kernels, rows, arena)
