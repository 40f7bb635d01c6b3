"""Layers on kernels: linear, activations, sums of arrays, dropout, LayerNorm, embedding, convolution
and pooling; softmax cross-entropy and losses of numbers.

A linear layer is one matrix product, which also adds the bias and applies the activation.
`kernels.multiply` is the matrix product that device.gemm chooses. The product that makes a weight
gradient also sums dy over its rows, which is the bias gradient. Contents of `saved`:

linear           x
with activation  (x, z) of GELU, (x, y) of ReLU: the signs of y are those of z. A backward of GELU writes dz over z
layer_norm       (x, mean, inverse). The input half of the backward reads all of x and dy. So it also
                 makes the partial sums that the weight half adds up

A convolution copies the windows of a tile of pixels into a matrix (im2col), which `multiply` takes.

Losses are summed on the device. The host synchronizes with the device only when it reads the sum.
The row stride of the logits may exceed the row length, since `logits` pads rows.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.launches import (
    INDEXED,
    KINDS,
    MOST_BLOCKS,
    POINTWISE,
    ROWS,
    SCRATCH,
    WIDE_ROWS,
    ByDtypes,
    Kind,
    add_parts,
    blocks,
    by_rows,
    element,
    index,
    most_shared,
    pointwise,
    result,
    row_blocks,
    sum_all,
    sum_rows,
)
from mpitrain.ops.cuda.product import ACTIVATIONS
from mpitrain.ops.random_bits import LANES, scale, threshold
from mpitrain.ops.reference.layers import turns

PITCH = 64
"""Rows of logits begin at multiples of this number of elements.

With an odd vocabulary, only every eighth row would be aligned for vector accesses.
"""


def pitch(columns: int) -> int:
    """Return the elements between rows of logits."""
    return -(-columns // PITCH) * PITCH


def linear(kernels, x, w, b, arena, out=None, residual=None):
    y = arena.take((len(x), len(w)), x.dtype) if out is None else out
    kernels.multiply(arena, x, w, y, transposed_b=True, bias=b, residual=residual)
    return y, x


def logits(kernels, x, w, b, arena):
    """Return (y, saved) as `linear`.

    Rows of y are padded to a multiple of PITCH elements; no operation reads or writes the padding.
    """
    y = arena.take((len(x), pitch(len(w))), x.dtype)[:, : len(w)]
    return linear(kernels, x, w, b, arena, y)


def linear_backward_input(kernels, dy, w, saved, arena, out=None):
    dx = arena.take(saved.shape, dy.dtype) if out is None else out
    kernels.multiply(arena, dy, w, dx)
    return dx, (dy, saved)


def gelu_linear_backward_input(kernels, dy, w, saved, before, arena):
    """Return (dz, pending) for a layer that follows `linear_gelu`: dz = (dy w) gelu'(z).

    dz is written over `before`, the z that `linear_gelu` saved; the weight half takes `pending`.
    """
    kernels.multiply(arena, dy, w, before, activation="gelu backward")
    return before, (dy, saved)


def linear_backward_weight(kernels, pending, dw, accumulate, arena, db=None):
    """Write or add dw = dy^T x. The same product sums dy over its rows for db, if db has their dtype."""
    dy, x = pending
    is_direct = db is not None and db.dtype == KINDS[dy.dtype].sums
    kernels.multiply(
        *(arena, dy, x, dw),
        transposed_a=True,
        beta=float(accumulate),
        row_sums=db if is_direct else None,
    )
    if db is not None and not is_direct:
        linear_backward_bias(kernels, pending, db, accumulate, arena)


def linear_backward_bias(kernels, pending, db, accumulate, arena):
    sum_rows(kernels, pending[0], db, accumulate, arena)


def linear_gelu(kernels, x, w, b, arena):
    y, z = arena.take((len(x), len(w)), x.dtype), arena.take((len(x), len(w)), x.dtype)
    kernels.multiply(arena, x, w, y, transposed_b=True, bias=b, activation="gelu", saved=z)
    return y, (x, z)


def linear_gelu_backward_input(kernels, dy, w, saved, arena, out=None):
    saved, z = saved
    _through_activation(kernels, "gelu", z, dy, z)
    return linear_backward_input(kernels, z, w, saved, arena, out)


def linear_relu(kernels, x, w, b, arena):
    y = arena.take((len(x), len(w)), x.dtype)
    kernels.multiply(arena, x, w, y, transposed_b=True, bias=b, activation="relu")
    return y, (x, y)


def linear_relu_backward_input(kernels, dy, w, saved, arena, out=None):
    saved, y = saved
    dz = _slope_times(kernels, "relu", y, dy, arena)
    return linear_backward_input(kernels, dz, w, saved, arena, out)


def gelu(kernels, z, arena):
    return _activated(kernels, "gelu", z, arena), z


def gelu_backward(kernels, dy, saved, arena):
    _through_activation(kernels, "gelu", saved, dy, saved)
    return saved


def gelu_erf(kernels, z, arena):
    return _activated(kernels, "gelu erf", z, arena), z


def gelu_erf_backward(kernels, dy, saved, arena):
    return _slope_times(kernels, "gelu erf", saved, dy, arena)


def tanh(kernels, z, arena):
    y = _activated(kernels, "tanh", z, arena)
    return y, y


def tanh_backward(kernels, dy, saved, arena):
    return _slope_times(kernels, "tanh", saved, dy, arena)


def soft_cap(kernels, z, cap, arena):
    return _capped(kernels, z, cap, 0, arena)


def clip(kernels, z, limit, arena):
    return _capped(kernels, z, limit, 1, arena)


def times(kernels, z, factor, arena):
    return _capped(kernels, z, factor, 2, arena)[0]


def _capped(kernels: Any, z: Any, cap: float, kind: int, arena: Any) -> tuple[Any, Any]:
    """Return (y, saved); rows of y are as far apart as those of z."""
    between = _pitch_of(z)
    y = arena.take((len(z), between), z.dtype)[:, : z.shape[1]]
    arguments = *z.shape, between, kind, cap, z, y
    _launch_padded(kernels, "soft_cap", arguments, z.dtype, "z y", fresh="y")
    return y, (z, cap, kind)


def soft_cap_backward(kernels, dy, saved, arena):
    z, cap, is_hard = saved
    between = _pitch_of(z)
    dz = arena.take((len(z), between), z.dtype)[:, : z.shape[1]]
    arguments = *z.shape, between, _pitch_of(dy), is_hard, cap, dy, z, dz
    _launch_padded(kernels, "soft_cap_backward", arguments, z.dtype, "dy z dz", fresh="dz")
    return dz


clip_backward = soft_cap_backward


def _launch_padded(kernels, name, arguments, dtype, strided, fresh=""):
    """Launch a kernel with one warp per row, on arrays whose rows are perhaps padded."""
    grid, macros = row_blocks(arguments[0]), KINDS[dtype].macros
    kernels.launch(name, grid, ROWS, arguments, macros=macros, strided=strided, fresh=fresh)


def _pitch_of(rows: Any) -> int:
    """Return the elements between rows."""
    return rows.strides[0] // rows.itemsize if len(rows) > 1 else rows.shape[1]


def relu(kernels, z, arena):
    y = _activated(kernels, "relu", z, arena)
    return y, y


def relu_backward(kernels, dy, saved, arena):
    return _slope_times(kernels, "relu", saved, dy, arena)


def _slope_times(kernels: Kernels, activation: str, saved: Any, dy: Any, arena: Any) -> Any:
    dz = arena.take(dy.shape, dy.dtype)
    _through_activation(kernels, activation, saved, dy, dz)
    return dz


def add(kernels, a, b, out, arena):
    macros = KINDS[a.dtype].macros
    pointwise(kernels, "add", (a.size, a, b, out), macros)


def weighted_sum(kernels, a, alpha, b, beta, out, arena):
    macros = KINDS[a.dtype].macros
    pointwise(kernels, "weighted_sum", (a.size, alpha, a, beta, b, out), macros)


def add_bias(kernels, x, b, out, arena, residual=None):
    columns = x.shape[-1]
    rows = x.size // columns
    by_rows(
        kernels,
        "add_bias",
        (rows, columns, x, b, residual, out),
        KINDS[x.dtype].macros,
        fresh="" if out is x else "y",
    )


def swiglu(kernels, x, arena):
    return _gated(kernels, x, arena, 0)


def swiglu_backward(kernels, dy, saved, arena):
    return _gated_backward(kernels, dy, saved, arena, 0)


def geglu(kernels, x, arena):
    return _gated(kernels, x, arena, 1)


def geglu_backward(kernels, dy, saved, arena):
    return _gated_backward(kernels, dy, saved, arena, 1)


def gate_rows(kernels, x, z, arena):
    y, macros = arena.take(x.shape, x.dtype), KINDS[x.dtype].macros
    by_rows(kernels, "gate_rows", (*x.shape, x, z, y), macros, fresh="y")
    return y, (x, z)


def gate_rows_backward(kernels, dy, saved, arena):
    x, z = saved
    dx, dz = arena.take(x.shape, dy.dtype), arena.take(z.shape, dy.dtype)
    arguments = *x.shape, dy, x, z, dx, dz
    by_rows(kernels, "gate_rows_backward", arguments, KINDS[dy.dtype].macros, fresh="dx")
    return dx, dz


def _gated(kernels, x, arena, is_gelu):
    rows, width = len(x), x.shape[1] // 2
    y, macros = arena.take((rows, width), x.dtype), KINDS[x.dtype].macros
    by_rows(kernels, "gated", (rows, width, is_gelu, x, y), macros, fresh="y")
    return y, x


def _gated_backward(kernels, dy, saved, arena, is_gelu):
    macros, dx = KINDS[dy.dtype].macros, arena.take(saved.shape, dy.dtype)
    arrays = *dy.shape, is_gelu, dy, saved, dx
    kernels.launch("gated_backward", row_blocks(len(dy)), ROWS, arrays, macros=macros, fresh="dx")
    return dx


POSITIONED = ByDtypes(lambda x, positions: element(x) | index(positions))


def rotate(
    kernels, x, heads, turned, theta, context, scaling, direction, arena, positions=None, out=None
):
    y = arena.take(x.shape, x.dtype) if out is None else out
    (_, length, columns), sums = x.shape, KINDS[x.dtype].sums
    half = columns // heads // 2
    count = x.size // (2 * half)
    angles = theta, half, context, scaling
    table = kernels.numbers.kept(("turns", *angles, sums), lambda: turns(*angles).astype(sums))
    integers = np.dtype(np.int32) if positions is None else positions.dtype
    by_rows(
        kernels,
        "rotate",
        (count, length, heads, turned, half, direction, x, table, positions, y),
        POSITIONED[x.dtype, integers],
        fresh="" if y is x else "y",
    )
    return y


def dropout(kernels, x, key, step, first, columns, rate, arena, residual=None, out=None):
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
            *(*key, kernels.numbers.integer(step), x, residual, y),
        ),
        macros=KINDS[x.dtype].macros,
        fresh="" if y is x else "y",
    )
    return y


def _activated(kernels: Kernels, activation: str, z: Any, arena: Any) -> Any:
    y, macros = arena.take(z.shape, z.dtype), KINDS[z.dtype].macros
    pointwise(
        kernels, "activation_forward", (z.size, ACTIVATIONS[activation], z, y), macros, fresh="y"
    )
    return y


def _through_activation(kernels: Kernels, activation: str, z: Any, dy: Any, dz: Any) -> None:
    macros = KINDS[z.dtype].macros
    pointwise(kernels, "activation_backward", (z.size, ACTIVATIONS[activation], z, dy, dz), macros)


PARTS = 4  # the most parts of the rows per multiprocessor, in a backward
FEWEST_ROWS = 8  # there are at most rows / FEWEST_ROWS parts, rounded up
MOST_RUNS = 512  # a backward has a row of at most so many runs in the registers of a block
REGISTERS = 4, 8
"""Sizes of the registers for a row in the forward, in runs for each thread.

A longer row is read from memory again.
"""


class ForwardKinds(dict):
    """A cache {(dtype, width of a row): `Kind` of the forward}.

    backward  {(dtype,): macros of the backward}
    """

    def __init__(self, **defines: int) -> None:
        super().__init__()
        self.backward = ByDtypes(lambda x: element(x) | defines)
        self._macros = {
            runs: ByDtypes(lambda x, runs=runs: element(x) | defines | {"ROW_RUNS": runs})
            for runs in REGISTERS
        }

    def __missing__(self, key: tuple[np.dtype, int]) -> Kind:
        dtype, width = key
        kind = KINDS[dtype]._replace(macros=self.backward[(dtype,)])
        runs = -(-width // (32 * kind.macros.run))
        for most, macros in self._macros.items():
            if runs <= most:
                kind = kind._replace(macros=macros[(dtype,)])
                break
        self[key] = kind
        return kind


FORWARD, WITHOUT_MEAN = ForwardKinds(), ForwardKinds(CENTRED=0)


def layer_norm(kernels, x, gain, bias, epsilon, arena):
    rows, width = x.shape
    sums, macros = FORWARD[x.dtype, width]
    y, mean, inverse = (
        arena.take(x.shape, x.dtype),
        arena.take((rows,), sums),
        arena.take((rows,), sums),
    )
    by_rows(
        kernels,
        "layer_norm",
        (rows, width, epsilon, x, gain, bias, y, mean, inverse),
        macros,
        fresh="y mean inverse",
    )
    return y, (x, mean, inverse)


def rms_norm(kernels, x, gain, epsilon, arena):
    rows, width = x.shape
    sums, macros = WITHOUT_MEAN[x.dtype, width]
    y, inverse = arena.take(x.shape, x.dtype), arena.take((rows,), sums)
    by_rows(
        kernels,
        "layer_norm",
        (rows, width, epsilon, x, gain, None, y, None, inverse),
        macros,
        fresh="y inverse",
    )
    return y, (x, None, inverse)


def rms_norm_backward_input(kernels, dy, gain, saved, arena, residual=None):
    return _norm_backward(kernels, dy, gain, saved, arena, residual, 1)


def rms_norm_backward_weight(kernels, pending, dgain, accumulate, arena):
    add_parts(kernels, pending[0], dgain, accumulate)


def layer_norm_backward_input(kernels, dy, gain, saved, arena, residual=None):
    """Return (dx, pending): dx with the residual added, and the state for the weight half.

    dy, dx   (M, C)
    pending  (2, parts, C): partial sums of dy times the normalised x, and of dy
    """
    return _norm_backward(kernels, dy, gain, saved, arena, residual, 2)


def _norm_backward(kernels, dy, gain, saved, arena, residual, count):
    """Return (dx, pending) of `layer_norm`, or of `rms_norm`.

    count  gradients of weights: gain and perhaps bias
    """
    rows, width = dy.shape
    dx = arena.take(dy.shape, dy.dtype)
    macros = (FORWARD if count == 2 else WITHOUT_MEAN).backward[(dy.dtype,)]
    wide = macros.run
    runs = -(-width // wide)
    sums = arena.take(
        (
            count,
            max(1, min(-(-rows // FEWEST_ROWS), PARTS * kernels.engine.multiprocessors)),
            width,
        ),
        KINDS[dy.dtype].sums,
    )
    parts_of = sums[0], sums[1] if count == 2 else None
    written = "dx gain_parts bias_parts" if count == 2 else "dx gain_parts"
    threads = min(-(-runs // 32) * 32, WIDE_ROWS[0])
    if runs <= MOST_RUNS:
        kernels.launch(
            "layer_norm_backward",
            sums.shape[1:2],
            (threads,),
            (rows, width, dy, gain, *saved, residual, dx, *parts_of),
            macros=macros,
            fresh=written,
        )
        return dx, sums
    shared = 4 * runs * wide * sums.itemsize
    keep = shared <= most_shared(kernels) - SCRATCH
    kernels.launch(
        "layer_norm_backward_wide",
        sums.shape[1:2],
        (threads,),
        (rows, width, int(keep), dy, gain, *saved, residual, dx, *parts_of),
        shared * keep,
        macros=macros,
        fresh=written,
    )
    return dx, sums


def layer_norm_backward_weight(kernels, pending, dgain, dbias, accumulate, arena):
    if dgain is None:
        add_parts(kernels, pending[1], dbias, accumulate)
    elif dbias is None:
        add_parts(kernels, pending[0], dgain, accumulate)
    else:
        add_parts(kernels, pending, dgain, accumulate, dbias)


TABLES = ByDtypes(lambda dx, dtable, tokens: element(dx) | result(dtable, dx) | index(tokens))
POSITIONS = ByDtypes(lambda dx, dpositions: element(dx) | result(dpositions, dx))


def embedding(kernels, tokens, table, positions, arena, first=0, out=None):
    vocab, width = table.shape
    x = arena.take((*tokens.shape, width), table.dtype) if out is None else out
    by_rows(
        kernels,
        "embedding",
        (tokens.size, tokens.shape[1], width, vocab, first, tokens, table, positions, x),
        INDEXED[table.dtype, tokens.dtype],
        fresh="x",
    )
    return x, (tokens, first)


def embedding_backward_table(kernels, dx, saved, dtable, accumulate, arena):
    tokens, first = saved
    vocab, width = dtable.shape
    macros = TABLES[dx.dtype, dtable.dtype, tokens.dtype]
    kernels.launch(
        "embedding_backward_table",
        (-(-vocab // 32), -(-width // (32 * macros.run))),
        ROWS,
        (tokens.size, width, vocab, first, tokens, dx, float(accumulate), dtable),
        macros=macros,
        fresh="" if accumulate else "dtable",
    )


def embedding_backward_positions(kernels, dx, dpositions, accumulate, arena):
    batch, length, width = dx.shape
    macros = POSITIONS[dx.dtype, dpositions.dtype]
    kernels.launch(
        "embedding_backward_positions",
        blocks(dpositions.size, macros.run),
        POINTWISE,
        (batch, length, width, len(dpositions), dx, float(accumulate), dpositions),
        macros=macros,
        fresh="" if accumulate else "dpositions",
    )


TILE_BYTES = 32 << 20
"""Bytes of the windows of a tile: enough rows to fill a GPU with one product."""


def conv2d(kernels, x, w, b, side, arena):
    return _convolved(kernels, x, w, b, side, arena), x


def conv2d_backward_input(kernels, dy, w, side, arena):
    """Return dx: the convolution of dy with the kernel turned by 180 degrees, its channels swapped."""
    outputs, channels = len(w), w.shape[1] // side**2
    turned = arena.take((channels, side * side * outputs), w.dtype)
    by_rows(
        kernels,
        "turned_kernels",
        (outputs * side**2, outputs, channels, side, w, turned),
        KINDS[w.dtype].macros,
        fresh="turned",
    )
    return _convolved(kernels, dy, turned, None, side, arena)


def conv2d_backward_weight(kernels, dy, saved, dw, side, accumulate, arena):
    pulls = dy.reshape(-1, dy.shape[-1])
    for rows, windows in _tiles(kernels, saved, side, arena):
        beta = float(accumulate or rows.start > 0)
        kernels.multiply(arena, pulls[rows], windows, dw, transposed_a=True, beta=beta)


def conv2d_backward_bias(kernels, dy, db, accumulate, arena):
    sum_rows(kernels, dy.reshape(-1, dy.shape[-1]), db, accumulate, arena)


def max_pool(kernels, x, size, arena):
    images, rows, columns, channels = x.shape
    shape = images, rows // size, columns // size, channels
    y, winners = arena.take(shape, x.dtype), arena.take(shape, "uint8")
    by_rows(
        kernels,
        "max_pool",
        (y.size // channels, rows, columns, channels, size, x, y, winners),
        KINDS[x.dtype].macros,
        fresh="y winners",
    )
    return y, (winners, x.shape)


def max_pool_backward(kernels, dy, saved, size, arena):
    winners, shape = saved
    dx = arena.take(shape, dy.dtype)
    by_rows(
        kernels,
        "max_pool_backward",
        (dx.size // shape[3], *shape[1:], size, dy, winners, dx),
        KINDS[dy.dtype].macros,
        fresh="dx",
    )
    return dx


def _convolved(kernels, x, w, b, side, arena):
    """Return x's windows times w^T, plus b.    w: (N, S S C); result: (B, H, W, N)"""
    y = arena.take((*x.shape[:3], len(w)), x.dtype)
    flat = y.reshape(-1, len(w))
    for rows, windows in _tiles(kernels, x, side, arena):
        kernels.multiply(arena, windows, w, flat[rows], transposed_b=True, bias=b)
    return y


def _tiles(kernels: Kernels, x: Any, side: int, arena: Any) -> Iterator[tuple[slice, Any]]:
    """Yield (rows of the flat output, windows (rows, S S C)) of each tile; without images, of none.

    The next tile overwrites the windows. x: (B, H, W, C), or a view of a contiguous (B, C, H, W).
    """
    images, height, width, channels = x.shape
    pixels, length = images * height * width, side * side * channels
    most = max(1, TILE_BYTES // (length * x.itemsize))
    windows = arena.take((min(pixels, most), length), x.dtype)
    # A kernel takes whole arrays, and these strides.
    stored = x if x.flags.c_contiguous else x.transpose(0, 3, 1, 2)
    steps = [step // x.itemsize for step in x.strides]
    for first in range(0, max(1, pixels), most):
        tile = windows[: min(most, pixels - first)]
        by_rows(
            kernels,
            "image_windows",
            (len(tile), first, height, width, channels, side, *steps, stored, tile),
            KINDS[x.dtype].macros,
            fresh="windows",
        )
        yield slice(first, first + len(tile)), tile


NO_TARGETS = np.dtype(np.int64)  # the dtype of targets for kernels that take none
LOSS_REGISTERS = 64  # the most registers per thread of kernels whose blocks may have 1024 threads


def cross_entropy(kernels, logits, targets, scale, arena, smoothing=0.0):
    losses, row = (
        arena.take((len(logits),), KINDS[logits.dtype].sums),
        logits.shape[1] * logits.itemsize,
    )
    keep = row <= most_shared(kernels) - SCRATCH
    _launch_by_columns(
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
    _launch_by_columns(
        kernels, "cross_entropy_loss", logits, (targets, logits, losses), targets.dtype, "losses"
    )
    return sum_all(kernels, losses, arena)


def count_correct(kernels, logits, targets, arena):
    correct = arena.take((len(logits),), KINDS[logits.dtype].sums)
    _launch_by_columns(
        kernels, "largest_is_target", logits, (targets, logits, correct), targets.dtype, "correct"
    )
    return sum_all(kernels, correct, arena)


def row_maximum(kernels, logits, arena, out=None):
    maxima = arena.take((len(logits),), KINDS[logits.dtype].sums) if out is None else out
    _launch_by_columns(kernels, "row_maximum", logits, (logits, maxima), NO_TARGETS, "maxima")
    return maxima


def row_exponentials(
    kernels, logits, targets, first, maxima, arena, out=None, smoothing=0.0, share=0.0
):
    facts = arena.take((2, len(logits)), KINDS[logits.dtype].sums) if out is None else out
    _launch_by_columns(
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
    _launch_by_columns(
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
    _launch_by_columns(
        kernels, "row_argmax", logits, (first, logits, maxima, places), NO_TARGETS, "places"
    )
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
            macros=INDEXED[predictions.dtype, NO_TARGETS],
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
    both = kernels.engine.multiprocessor.resident(half, LOSS_REGISTERS, shared + SCRATCH) >= 2
    return (half,) if both else WIDE_ROWS


def _launch_by_columns(
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
