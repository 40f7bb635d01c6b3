"""Linear layers with an optional activation: one product each, with all other work in its epilogue;
passes over elements.

`multiply` is a function of product.py. M rows, K inputs, N outputs. `saved` is (x, has a bias), or
a pair of that and the data for the activation's derivative. The product of the weight half also
sums dy over its rows: this is the bias gradient. `_Pending` passes it to a bias half that adds.
"""

from collections.abc import Callable
from typing import Any

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.elements import KINDS
from mpitrain.ops.cuda.grids import MOST_BLOCKS, POINTWISE, ROWS, blocks, row_blocks
from mpitrain.ops.cuda.product import ACTIVATIONS
from mpitrain.ops.cuda.steps import Numbers
from mpitrain.ops.cuda.sums import add_parts, sum_rows
from mpitrain.ops.random_bits import LANES, scale, threshold

Multiply = Callable[..., None]

PITCH = 64
"""Rows of logits begin at multiples of this number of elements.

With an odd vocabulary, only every eighth row would be aligned for vector accesses.
"""


def pitch(columns: int) -> int:
    """Return the elements between rows of logits."""
    return -(-columns // PITCH) * PITCH


class _Pending:
    """The gradient dy and input x of a linear layer.

    sums  None, or dy's sum over rows once the weight half has made it
    """

    def __init__(self, dy: Any, x: Any, has_bias: bool):
        self.dy, self.x, self.has_bias, self.sums = dy, x, has_bias, None


def linear(kernels: Kernels, multiply: Multiply, x, w, b, arena, out=None, residual=None):
    """Return (y, saved) with y = x w^T + b + residual."""
    y = arena.take((len(x), len(w)), x.dtype) if out is None else out
    multiply(kernels, arena, x, w, y, transposed_b=True, bias=b, residual=residual)
    return y, (x, b is not None)


def logits(kernels: Kernels, multiply: Multiply, x, w, b, arena):
    """Return (y, saved) as `linear`.

    Rows of y are padded to a multiple of PITCH elements; no operation reads or writes the padding.
    """
    y = arena.take((len(x), pitch(len(w))), x.dtype)[:, : len(w)]
    return linear(kernels, multiply, x, w, b, arena, y)


def linear_backward_input(kernels: Kernels, multiply: Multiply, dy, w, saved, arena, out=None):
    """Return (dx, pending) with dx = dy w; the weight and bias halves take `pending`."""
    x, has_bias = saved
    dx = arena.take(x.shape, dy.dtype) if out is None else out
    multiply(kernels, arena, dy, w, dx)
    return dx, _Pending(dy, x, has_bias)


def gelu_linear_backward_input(kernels: Kernels, multiply: Multiply, dy, w, saved, before, arena):
    """Return (dz, pending) for a layer that follows `linear_gelu`: dz = (dy w) gelu'(z).

    dz is written over `before`, the z that `linear_gelu` saved; the weight half takes `pending`.
    """
    multiply(kernels, arena, dy, w, before, activation="gelu backward")
    return before, _Pending(dy, *saved)


def linear_backward_weight(
    kernels: Kernels, multiply: Multiply, pending, dw, accumulate, arena, db=None
):
    """Write or add dw = dy^T x. The same product sums dy over rows, for db or for the bias half.

    The product writes its row sums to db, if db has their dtype.
    """
    dtype = KINDS[pending.dy.dtype].sums
    is_direct = db is not None and db.dtype == dtype
    sums = db if is_direct else None
    if sums is None and (pending.has_bias or db is not None):
        sums = arena.take(dw.shape[:1], dtype)
    multiply(
        kernels,
        arena,
        pending.dy,
        pending.x,
        dw,
        transposed_a=True,
        beta=float(accumulate),
        row_sums=sums,
    )
    pending.sums = None if is_direct else sums
    if db is not None and not is_direct:
        linear_backward_bias(kernels, pending, db, False, arena)


def linear_backward_bias(kernels: Kernels, pending, db, accumulate, arena):
    """Write or add db, the sum of dy over rows."""
    if pending.sums is None:
        sum_rows(kernels, pending.dy, db, accumulate, arena)
    else:
        add_parts(kernels, pending.sums[None], db, accumulate)


def linear_gelu(kernels: Kernels, multiply: Multiply, x, w, b, arena):
    """Return (y, saved) with y = gelu(x w^T + b); the product z is saved for the backward."""
    y, z = arena.take((len(x), len(w)), x.dtype), arena.take((len(x), len(w)), x.dtype)
    multiply(kernels, arena, x, w, y, transposed_b=True, bias=b, activation="gelu", saved=z)
    return y, ((x, b is not None), z)


def linear_gelu_backward_input(kernels: Kernels, multiply: Multiply, dy, w, saved, arena, out=None):
    """Return (dx, pending), the input half of the backward pass of `linear_gelu`.

    Computes dz = dy gelu'(z) in place of the saved z, then calls `linear_backward_input` with dz.
    """
    saved, z = saved
    _through_activation(kernels, "gelu", z, dy, z)
    return linear_backward_input(kernels, multiply, z, w, saved, arena, out)


def linear_relu(kernels: Kernels, multiply: Multiply, x, w, b, arena):
    """Return (y, saved) with y = max(0, x w^T + b); the signs of y suffice for the backward."""
    y = arena.take((len(x), len(w)), x.dtype)
    multiply(kernels, arena, x, w, y, transposed_b=True, bias=b, activation="relu")
    return y, ((x, b is not None), y)


def linear_relu_backward_input(kernels: Kernels, multiply: Multiply, dy, w, saved, arena, out=None):
    """Return (dx, pending), the input half of the backward pass of `linear_relu`.

    Computes dz = dy relu'(z), then calls `linear_backward_input` with dz.
    """
    saved, y = saved
    dz = arena.take(dy.shape, dy.dtype)
    _through_activation(kernels, "relu", y, dy, dz)
    return linear_backward_input(kernels, multiply, dz, w, saved, arena, out)


def gelu(kernels: Kernels, z, arena):
    """Return (y, saved) with y = gelu(z)."""
    return _activated(kernels, "gelu", z, arena), z


def gelu_backward(kernels: Kernels, dy, saved, arena):
    """Return dz, written over the saved z."""
    _through_activation(kernels, "gelu", saved, dy, saved)
    return saved


def relu(kernels: Kernels, z, arena):
    """Return (y, saved) with y = max(0, z); the signs of y suffice for the backward."""
    y = _activated(kernels, "relu", z, arena)
    return y, y


def relu_backward(kernels: Kernels, dy, saved, arena):
    """Return dz."""
    dz = arena.take(dy.shape, dy.dtype)
    _through_activation(kernels, "relu", saved, dy, dz)
    return dz


def add(kernels: Kernels, a, b, out, arena):
    """Write a + b to out, which may be a or b."""
    macros = KINDS[a.dtype].macros
    kernels.launch("add", blocks(a.size, macros.run), POINTWISE, (a.size, a, b, out), macros=macros)


def weighted_sum(kernels: Kernels, a, alpha, b, beta, out, arena):
    """Write alpha a + beta b to out, which may be a or b."""
    macros = KINDS[a.dtype].macros
    kernels.launch(
        "weighted_sum",
        blocks(a.size, macros.run),
        POINTWISE,
        (a.size, alpha, a, beta, b, out),
        macros=macros,
    )


def add_bias(kernels: Kernels, x, b, out, arena, residual=None):
    """Write x + b + residual to out, which may be x; b is added to every row."""
    columns = x.shape[-1]
    rows = x.size // columns
    kernels.launch(
        "add_bias",
        row_blocks(rows),
        ROWS,
        (rows, columns, x, b, residual, out),
        macros=KINDS[x.dtype].macros,
        fresh="" if out is x else "y",
    )


def dequantize(kernels: Kernels, q, scale, out, arena):
    """Write (q - 128) times the scale of each row to out."""
    rows, columns = out.shape
    kernels.launch(
        "dequantize",
        row_blocks(rows),
        ROWS,
        (rows, columns, q, scale, out),
        macros=KINDS[out.dtype].macros,
        fresh="y",
    )


def dropout(
    kernels: Kernels,
    numbers: Numbers,
    x,
    key,
    step,
    first,
    columns,
    rate,
    arena,
    residual=None,
    out=None,
):
    """Return x mask / (1 - p) + residual; out may be x.    x, residual, out: (M, C)"""
    y = arena.take(x.shape, x.dtype) if out is None else out
    rows, width = x.shape
    if columns == width:
        rows, width = 1, x.size
    across = blocks((width + 2 * LANES - 2) // LANES)[0]
    kernels.launch(
        "dropout",
        (across, min(rows, MOST_BLOCKS) if x.size else 0),
        POINTWISE,
        (
            *(rows, width, first, columns, threshold(rate), scale(rate)),
            *(*key, numbers.integer(step), x, residual, y),
        ),
        macros=KINDS[x.dtype].macros,
        fresh="" if y is x else "y",
    )
    return y


def _activated(kernels: Kernels, activation: str, z: Any, arena: Any) -> Any:
    y, macros = arena.take(z.shape, z.dtype), KINDS[z.dtype].macros
    kernels.launch(
        "activation_forward",
        blocks(z.size, macros.run),
        POINTWISE,
        (z.size, ACTIVATIONS[activation], z, y),
        macros=macros,
        fresh="y",
    )
    return y


def _through_activation(kernels: Kernels, activation: str, z: Any, dy: Any, dz: Any) -> None:
    macros = KINDS[z.dtype].macros
    kernels.launch(
        "activation_backward",
        blocks(z.size, macros.run),
        POINTWISE,
        (z.size, ACTIVATIONS[activation], z, dy, dz),
        macros=macros,
    )
