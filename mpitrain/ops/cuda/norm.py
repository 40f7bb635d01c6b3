"""LayerNorm. `saved` is (x, mean, inverse); the gain half also sums what the bias half will need."""

from typing import Any

from mpitrain.kernels.arguments import fresh
from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.elements import element, sum_type
from mpitrain.ops.cuda.grids import ROWS, parts, row_blocks
from mpitrain.ops.cuda.sums import COLUMNS, add_parts, sum_rows
from mpitrain.ops.reference import EPSILON


class _Pending:
    """dy and what was saved, and the parts of the bias gradient once the gain half has made them."""

    def __init__(self, dy: Any, saved: Any):
        self.dy, self.saved, self.sums = dy, saved, None


def layer_norm(kernels: Kernels, x, gain, bias, arena):
    """y = (x - mean) / sqrt(var + EPSILON) * gain + bias over the last dim."""
    rows, width = x.shape
    y, mean, inverse = arena.take(x.shape, x.dtype), arena.take((rows,), sum_type(x)), arena.take((rows,), sum_type(x))
    kernels.launch("layer_norm", row_blocks(rows), ROWS,
                   (rows, width, EPSILON, x, gain, bias, fresh(y), fresh(mean), fresh(inverse)), **element(x))
    return y, (x, mean, inverse)


def layer_norm_backward_input(kernels: Kernels, dy, gain, saved, arena):
    """(dx, pending)."""
    rows, width = dy.shape
    dx = arena.take(dy.shape, dy.dtype)
    kernels.launch("layer_norm_backward_input", row_blocks(rows), ROWS,
                   (rows, width, dy, gain, *saved, fresh(dx)), **element(dy))
    return dx, _Pending(dy, saved)


def layer_norm_backward_gain(kernels: Kernels, pending, dgain, accumulate, arena):
    """Write or add the sum over rows of dy times the normalised x."""
    rows, width = pending.dy.shape
    sums = arena.take((2, parts(rows, width), width), sum_type(pending.dy))
    kernels.launch("layer_norm_backward_weight", (-(-width // 32), sums.shape[1]), COLUMNS,
                   (rows, width, pending.dy, *pending.saved, fresh(sums[0]), fresh(sums[1])), **element(pending.dy))
    add_parts(kernels, sums[0], dgain, accumulate)
    pending.sums = sums[1]


def layer_norm_backward_bias(kernels: Kernels, pending, dbias, accumulate, arena):
    """Write or add the sum over rows of dy."""
    if pending.sums is None:
        sum_rows(kernels, pending.dy, dbias, accumulate, arena)
    else:
        add_parts(kernels, pending.sums, dbias, accumulate)
