"""LayerNorm. `saved` is (x, mean, inverse); the gain half also sums what the bias half will need."""

from typing import Any

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.elements import KINDS
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
    sums, macros = KINDS[x.dtype]
    y, mean, inverse = arena.take(x.shape, x.dtype), arena.take((rows,), sums), arena.take((rows,), sums)
    kernels.launch("layer_norm", row_blocks(rows), ROWS, (rows, width, EPSILON, x, gain, bias, y, mean, inverse),
                   macros=macros, fresh="y mean inverse")
    return y, (x, mean, inverse)


def layer_norm_backward_input(kernels: Kernels, dy, gain, saved, arena):
    """(dx, pending)."""
    rows, width = dy.shape
    dx = arena.take(dy.shape, dy.dtype)
    kernels.launch("layer_norm_backward_input", row_blocks(rows), ROWS,
                   (rows, width, dy, gain, *saved, dx), macros=KINDS[dy.dtype].macros, fresh="dx")
    return dx, _Pending(dy, saved)


def layer_norm_backward_gain(kernels: Kernels, pending, dgain, accumulate, arena):
    """Write or add the sum over rows of dy times the normalised x."""
    rows, width = pending.dy.shape
    kind = KINDS[pending.dy.dtype]
    sums = arena.take((2, parts(rows, width), width), kind.sums)
    kernels.launch("layer_norm_backward_weight", (-(-width // 32), sums.shape[1]), COLUMNS,
                   (rows, width, pending.dy, *pending.saved, sums[0], sums[1]), macros=kind.macros, fresh="gain_parts bias_parts")
    add_parts(kernels, sums[0], dgain, accumulate)
    pending.sums = sums[1]


def layer_norm_backward_bias(kernels: Kernels, pending, dbias, accumulate, arena):
    """Write or add the sum over rows of dy."""
    if pending.sums is None:
        sum_rows(kernels, pending.dy, dbias, accumulate, arena)
    else:
        add_parts(kernels, pending.sums, dbias, accumulate)
