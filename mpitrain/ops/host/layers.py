"""Matrix products with bias and activation, passes over rows, LayerNorm, embedding, images; softmax
cross-entropy, and counting correct predictions.

z is the input of an activation. Contents of `saved` and `pending`:

linear           saved is x; pending is (dy, x)
with activation  saved is (x, the activation's slope at every element); pending is (dz, x). The slope
                 of ReLU is 0 or 1. A backward writes dz over the slope
layer_norm       saved is the normalised rows (M, C) and 1 / standard deviation (M, 1). pending is
                 the pair of both gradients, computed while its blocks are in cache
embedding        saved is each token's row in the table; a row outside 0 to V - 1 is another slice's

`ops/reference/layers.py` defines maxima, facts and places, the numbers of a split vocabulary. M
rows, V entries of the vocabulary (or of a slice of it), or classes.

A convolution is a tiled matrix product. A tile is a band of rows of one image, or several images.
Its windows become the rows of a matrix (im2col) that stays in cache. A matrix of all windows is
never in memory.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.polynomial import chebyshev

from mpitrain.data.source import IGNORED
from mpitrain.machine.backend import copy_rows, has_memory
from mpitrain.ops.host.passes import NUMPY
from mpitrain.ops.host.product import (
    block_shape,
    blocks_of,
    constant,
    put_product,
    rounds,
    row_blocks,
    sum_rows,
)
from mpitrain.ops.random_bits import RandomBits, scale, threshold
from mpitrain.ops.reference.layers import GELU_CUBIC, GELU_SCALE, turns

GELU = GELU_SCALE, GELU_SCALE * GELU_CUBIC
"""c1 and c3 of the pass `gelu`."""


def linear(x, w, b, arena, out=None, residual=None):
    # BLAS packs w anew in every call. At 128 rows a call, that costs a third of the product.
    y = arena.take((len(x), len(w)), x.dtype) if out is None else out
    put_product(x, w.T, y, False, arena)
    add_bias(y, b, y, arena, residual)
    return y, x


def add_bias(x, b, out, arena, residual=None):
    for rows in row_blocks(out):
        y, sums = out[rows], x[rows]
        if b is not None:
            sums = np.add(sums, b, out=y)
        if residual is not None:
            sums = np.add(sums, residual[rows], out=y)
        if sums is not y and out is not x:
            y[...] = sums


def logits(x, w, b, arena):
    return linear(x, w, b, arena)


def linear_backward_input(dy, w, saved, arena, out=None):
    dx = arena.take(saved.shape, dy.dtype) if out is None else out
    put_product(dy, w, dx, False, arena)
    return dx, (dy, saved)


def gelu_linear_backward_input(dy, w, saved, before, arena):
    dx, pending = linear_backward_input(dy, w, saved, arena)
    before *= dx
    return before, pending


def linear_backward_weight(pending, dw, accumulate, arena, db=None):
    dy, x = pending
    put_product(dy.T, x, dw, accumulate, arena)
    if db is not None:
        sum_rows(dy, db, accumulate, arena)


def linear_backward_bias(pending, db, accumulate, arena):
    sum_rows(pending[0], db, accumulate, arena)


def linear_gelu(passes_of, x, w, b, arena):
    y, slope = (arena.take((len(x), len(w)), x.dtype) for _ in range(2))
    put_product(x, w.T, y, False, arena)
    passes_of(x, w, b).gelu(*GELU, y, b, slope, arena)
    return y, (x, slope)


def linear_gelu_backward_input(dy, w, saved, arena, out=None):
    x, slope = saved
    slope *= dy
    return linear_backward_input(slope, w, x, arena, out)


def linear_relu(x, w, b, arena):
    y, _ = linear(x, w, b, arena)
    y, slope = relu(y, arena)
    return y, (x, slope)


linear_relu_backward_input = linear_gelu_backward_input


def gelu(passes_of, z, arena):
    rows, slope = z.reshape(-1, z.shape[-1]), arena.take(z.shape, z.dtype)
    passes_of(z).gelu(*GELU, rows, None, slope.reshape(rows.shape), arena)
    return z, slope


def gelu_backward(dy, saved, arena):
    saved *= dy
    return saved


def gelu_erf(z, arena):
    y, every_slope = arena.take(z.shape, z.dtype), arena.take(z.shape, z.dtype)
    scratch, polynomial = arena.take((2, *block_shape(z)), z.dtype), _erfc_polynomial()
    for block, out, slope in blocks_of(z, y, every_slope):
        t, p = scratch[:, : len(block)]
        np.abs(block, out=t)
        t *= 0.5**0.5
        np.minimum(t, ERFC_END, out=t)
        t += 2
        np.divide(4 * ERFC_SCALE, t, out=t)
        t += 1 - 2 * ERFC_SCALE
        np.multiply(t, polynomial[-1], out=p)
        for coefficient in polynomial[-2:0:-1]:
            p += coefficient
            p *= t
        p += polynomial[0]
        np.multiply(block, block, out=slope)
        slope *= -0.5
        np.exp(slope, out=slope)
        p *= slope  # twice the distribution at -|z|
        p *= 0.5
        np.subtract(1, p, out=p, where=block > 0)
        np.multiply(block, p, out=out)
        slope *= (2 * np.pi) ** -0.5
        slope *= block
        slope += p
    return y, every_slope


ERFC_END = 6.0
"""From here on erfc(s) is below the rounding of 1."""
ERFC_SCALE = 1 / (1 - 1 / (1 + ERFC_END / 2))
"""t = 1 / (1 + s / 2) for s from 0 to ERFC_END, moved to 1 .. -1, is 2 ERFC_SCALE (t - 1) + 1."""


@lru_cache(1)
def _erfc_polynomial() -> list[float]:
    """Return the coefficients of p, lowest first, with erfc(s) = p(t) exp(-s^2) within 1e-15.

    t from -1 to 1 is a fraction of s: see ERFC_SCALE.
    """

    def values(t):
        every_s = 2 / (1 + (t - 1) / (2 * ERFC_SCALE)) - 2
        return [math.erfc(s) * math.exp(s * s) for s in every_s]

    return chebyshev.cheb2poly(chebyshev.chebinterpolate(values, 18)).tolist()


def gelu_erf_backward(dy, saved, arena):
    saved *= dy
    return saved


def tanh(z, arena):
    y = arena.take(z.shape, z.dtype)
    np.tanh(z, out=y)
    return y, y


def tanh_backward(dy, saved, arena):
    dz = arena.take(dy.shape, dy.dtype)
    np.multiply(saved, saved, out=dz)
    np.subtract(1, dz, out=dz)
    dz *= dy
    return dz


def soft_cap(z, cap, arena):
    y, slope = arena.take(z.shape, z.dtype), arena.take(z.shape, z.dtype)
    for block, out, own in blocks_of(z, y, slope):
        np.multiply(block, 1 / cap, out=out)
        np.tanh(out, out=out)
        np.multiply(out, out, out=own)
        np.subtract(1, own, out=own)
        out *= cap
    return y, slope


def relu(z, arena):
    slope = arena.take(z.shape, z.dtype)
    np.greater(z, 0, out=slope)
    np.maximum(z, 0, out=z)
    return z, slope


def clip(z, limit, arena):
    y, slope = arena.take(z.shape, z.dtype), arena.take(z.shape, z.dtype)
    for block, out, own in blocks_of(z, y, slope):
        np.clip(block, -limit, limit, out=out)
        np.less_equal(np.abs(block, out=own), limit, out=own)
    return y, slope


def times(z, factor, arena):
    return np.multiply(z, factor, out=arena.take(z.shape, z.dtype))


relu_backward = soft_cap_backward = clip_backward = gelu_backward


def weighted_sum(a, alpha, b, beta, out, arena):
    scratch = arena.take(block_shape(out), out.dtype)
    for rows in row_blocks(out):
        part = None if b is None else np.multiply(b[rows], beta, out=scratch[: len(out[rows])])
        np.multiply(a[rows], alpha, out=out[rows])
        if part is not None:
            out[rows] += part


def dropout(x, key, step, first, columns, rate, arena, residual=None, out=None):
    y = arena.take(x.shape, x.dtype) if out is None else out
    bits, least, most = RandomBits(key, step), np.uint16(threshold(rate)), scale(rate)
    scratch, width = arena.take(block_shape(x), x.dtype), x.shape[1]
    for rows in row_blocks(x):
        mask, block = scratch[: len(x[rows])], y[rows]
        run = bits.run(first + rows.start * columns, (len(mask) - 1) * columns + width)
        np.greater_equal(_rows(run, len(mask), width, columns), least, out=mask)
        np.multiply(x[rows], mask, out=block)
        block *= most
        if residual is not None:
            block += residual[rows]
    return y


def _rows(run, rows, width, columns):
    """Return a view (rows, width) of rows that begin `columns` elements apart."""
    step = run.itemsize
    return np.lib.stride_tricks.as_strided(run, (rows, width), (columns * step, step))


def layer_norm(passes_of, x, gain, bias, epsilon, arena):
    y, normal = arena.take(x.shape, x.dtype), arena.take(x.shape, x.dtype)
    inverse = arena.take((len(x), 1), x.dtype)
    passes_of(x, gain, bias).layer_norm(epsilon, x, gain, bias, y, normal, inverse)
    return y, (normal, inverse)


def layer_norm_backward_input(passes_of, dy, gain, saved, arena, residual=None):
    dx = arena.take(dy.shape, dy.dtype)
    sums = arena.take((4, dy.shape[1]), dy.dtype)
    dgain, dbias, part = sums[0], sums[1], sums[2:]
    passes = passes_of(dy, gain, *saved, residual)
    passes.layer_norm_backward(dy, gain, *saved, residual, dx, dgain, dbias, part, arena)
    return dx, (dgain, dbias)


def layer_norm_backward_weight(pending, dgain, dbias, accumulate, arena):
    for sums, out in zip(pending, (dgain, dbias), strict=True):
        if out is not None and accumulate:
            out += sums
        elif out is not None:
            out[...] = sums


def rms_norm(x, gain, epsilon, arena):
    every_y, normal = arena.take(x.shape, x.dtype), arena.take(x.shape, x.dtype)
    every_inverse = arena.take((len(x), 1), x.dtype)
    for block, y, n, inverse in blocks_of(x, every_y, normal, every_inverse):
        np.vecdot(block, block, out=inverse[:, 0])
        inverse /= x.shape[1]
        inverse += epsilon
        np.sqrt(inverse, out=inverse)
        np.divide(1, inverse, out=inverse)
        np.multiply(block, inverse, out=n)
        np.multiply(n, gain, out=y)
    return every_y, (normal, every_inverse)


def rms_norm_backward_input(dy, gain, saved, arena, residual=None):
    normal, every_inverse = saved
    dx = arena.take(dy.shape, dy.dtype)
    dgain, part = arena.take((2, dy.shape[1]), dy.dtype)
    dgain.fill(0)
    scratch = arena.take(block_shape(dy), dy.dtype)
    ones = constant(len(scratch), 1, dy.dtype)
    means = arena.take((len(scratch), 1), dy.dtype)
    weights = gain / dy.shape[1]
    for block, n, d, inverse, more in blocks_of(dy, normal, dx, every_inverse, residual):
        count = len(d)
        product, mean = scratch[:count], means[:count]
        np.multiply(block, n, out=product)
        dgain += np.matmul(ones[:count], product, out=part)
        np.matmul(product, weights, out=mean[:, 0])  # This is the mean of dy gain normal.
        np.multiply(block, gain, out=d)
        d -= np.multiply(n, mean, out=product)
        d *= inverse
        if more is not None:
            d += more
    return dx, dgain


def rms_norm_backward_weight(pending, dgain, accumulate, arena):
    layer_norm_backward_weight((pending, None), dgain, None, accumulate, arena)


def swiglu(x, arena):
    width = x.shape[1] // 2
    y = arena.take((len(x), width), x.dtype)
    for block, out in blocks_of(x, y):
        _logistic(block[:, :width], out)
        out *= block[:, :width]
        out *= block[:, width:]
    return y, x


def swiglu_backward(dy, saved, arena):
    width, dx = dy.shape[1], arena.take(saved.shape, dy.dtype)
    scratch = arena.take(block_shape(dy), dy.dtype)
    for block, x, out in blocks_of(dy, saved, dx):
        gate, share = x[:, :width], scratch[: len(block)]
        dgate, dup = out[:, :width], out[:, width:]
        _logistic(gate, share)
        np.subtract(1, share, out=dgate)
        dgate *= gate
        dgate += 1
        dgate *= share
        dgate *= x[:, width:]
        dgate *= block
        np.multiply(gate, share, out=dup)
        dup *= block
    return dx


def gate_rows(x, z, arena):
    y, share = arena.take(x.shape, x.dtype), arena.take(z.shape, z.dtype)
    _logistic(z, share)
    np.multiply(x, share, out=y)
    return y, (x, share)


def gate_rows_backward(dy, saved, arena):
    x, share = saved
    dx, dz = arena.take(dy.shape, dy.dtype), arena.take(share.shape, dy.dtype)
    np.vecdot(dy, x, out=dz[:, 0])
    dz *= share
    dz *= 1 - share
    np.multiply(dy, share, out=dx)
    return dx, dz


def geglu(x, arena):
    width = x.shape[1] // 2
    y = arena.take((len(x), width), x.dtype)
    copy_rows(y, x[:, :width])
    NUMPY.gelu(*GELU, y, None, arena.take(y.shape, y.dtype), arena)
    for block, out in blocks_of(x, y):
        out *= block[:, width:]
    return y, x


def geglu_backward(dy, saved, arena):
    width, dx = dy.shape[1], arena.take(saved.shape, dy.dtype)
    gate = arena.take(dy.shape, dy.dtype)
    copy_rows(gate, saved[:, :width])
    every_slope = arena.take(gate.shape, gate.dtype)
    NUMPY.gelu(*GELU, gate, None, every_slope, arena)
    for block, x, value, slope, out in blocks_of(dy, saved, gate, every_slope, dx):
        np.multiply(block, x[:, width:], out=out[:, :width])
        out[:, :width] *= slope
        np.multiply(block, value, out=out[:, width:])
    return dx


@np.errstate(over="ignore")  # 1 / (1 + infinity) is 0
def _logistic(z, out):
    np.negative(z, out=out)
    np.exp(out, out=out)
    out += 1
    np.divide(1, out, out=out)


def rotate(x, heads, turned, theta, context, scaling, direction, arena, positions=None, out=None):
    (batch, length, _), width = x.shape, x.shape[2] // heads // 2
    y = arena.take(x.shape, x.dtype) if out is None else out
    table = _turns(theta, width, context, scaling, x.dtype)
    crossed = arena.take((2, length, turned, width), x.dtype)
    shape = batch, length, heads, 2, width
    pairs, results = x.reshape(shape), y.reshape(shape)
    if y is not x:
        results[:, :, turned:] = pairs[:, :, turned:]
    for row in rounds(range(batch), x):
        at = table[:length] if positions is None else table[positions[row]]
        cos, sin = at[:, 0, None], at[:, 1, None]
        a, b = pairs[row, :, :turned, 0], pairs[row, :, :turned, 1]
        np.multiply(a, sin, out=crossed[0])
        np.multiply(b, sin, out=crossed[1])
        first, second = results[row, :, :turned, 0], results[row, :, :turned, 1]
        np.multiply(a, cos, out=first)
        np.multiply(b, cos, out=second)
        (np.subtract if direction > 0 else np.add)(first, crossed[1], out=first)
        (np.add if direction > 0 else np.subtract)(second, crossed[0], out=second)
    return y


@lru_cache(16)
def _turns(theta, width, context, scaling, dtype):
    """Return `turns` in a dtype, read-only; layers and micro-batches share it."""
    table = turns(theta, width, context, scaling).astype(dtype)
    table.flags.writeable = False
    return table


def embedding(tokens, table, positions, arena, first=0, out=None):
    rows = tokens - first
    x = arena.take((*tokens.shape, table.shape[1]), table.dtype) if out is None else out
    if len(table):
        # The default mode would copy through a buffer.
        np.take(table, rows, axis=0, out=x, mode="clip")
    x[(rows < 0) | (rows >= len(table))] = 0
    if positions is not None:
        x += positions[: tokens.shape[1]]
    return x, rows


def embedding_backward_table(dx, saved, dtable, accumulate, arena):
    """Sort dx by table row and sum each run of equal rows, so that no row is written twice.

    dx: (B, T, C); dtable: (V, C)
    """
    if not accumulate:
        dtable.fill(0)
    rows = saved.reshape(-1)
    order = rows.argsort(kind="stable")
    # Only rows of this table remain.
    order = order[slice(*np.searchsorted(rows, (0, len(dtable)), sorter=order))]
    if not len(order):
        return
    rows = rows[order]
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    # The buffers have their largest possible length. A length that changed at every step would take
    # a new buffer each time.
    sorted_dx, sums = (arena.take((saved.size, dx.shape[-1]), dx.dtype) for _ in range(2))
    sorted_dx = np.take(
        dx.reshape(sorted_dx.shape), order, axis=0, out=sorted_dx[: len(order)], mode="clip"
    )
    dtable[rows[starts]] += np.add.reduceat(sorted_dx, starts, axis=0, out=sums[: len(starts)])


def embedding_backward_positions(dx, dpositions, accumulate, arena):
    batch, length, width = dx.shape
    if not accumulate:
        dpositions[length:] = 0
    sum_rows(dx.reshape(batch, length * width), dpositions[:length].reshape(-1), accumulate, arena)


TILE_BYTES = 1 << 20
"""Bytes of the windows of a tile: BLAS packs the kernel anew for each tile."""


def conv2d(x, w, b, side, arena):
    return _convolved(x, w.T, b, side, arena), x


def conv2d_backward_input(dy, w, side, arena):
    """Return dx: the convolution of dy with the kernel turned by 180 degrees, its channels swapped."""
    outputs, channels = len(w), w.shape[1] // side**2
    turned = arena.take((side, side, outputs, channels), w.dtype)
    taps = w.reshape(outputs, side, side, channels)[:, ::-1, ::-1]
    turned[...] = taps.transpose(1, 2, 0, 3)
    return _convolved(dy, turned.reshape(-1, channels), None, side, arena)


def conv2d_backward_weight(dy, saved, dw, side, accumulate, arena):
    pulls = dy.reshape(-1, dy.shape[-1])
    if not (accumulate or len(pulls)):
        dw[...] = 0
    for rows, windows in _tiles(saved, side, arena):
        put_product(pulls[rows].T, windows, dw, accumulate, arena)
        accumulate = True


def conv2d_backward_bias(dy, db, accumulate, arena):
    sum_rows(dy.reshape(-1, dy.shape[-1]), db, accumulate, arena)


def max_pool(x, size, arena):
    images, rows, columns, channels = x.shape
    shape = images, rows // size, columns // size, channels
    y, winners = arena.take(shape, x.dtype), arena.take(shape, np.uint8)
    is_larger = arena.take(shape, np.bool_)
    y[...] = _candidates(x, shape, size, 0)
    winners.fill(0)
    for number in range(1, size * size):
        other = _candidates(x, shape, size, number)
        np.greater(other, y, out=is_larger)
        np.copyto(winners, number, where=is_larger)
        np.maximum(y, other, out=y)
    return y, (winners, x.shape)


def max_pool_backward(dy, saved, size, arena):
    winners, shape = saved
    dx, is_winner = arena.take(shape, dy.dtype), arena.take(dy.shape, np.bool_)
    dx[:, dy.shape[1] * size :] = 0
    dx[:, :, dy.shape[2] * size :] = 0
    for number in range(size * size):
        np.equal(winners, number, out=is_winner)
        np.multiply(dy, is_winner, out=_candidates(dx, dy.shape, size, number))
    return dx


def _candidates(x, shape, size, number):
    """Return a strided view of x: the element with this number in each window. Its shape is y's."""
    row, column = divmod(number, size)
    return x[:, row : shape[1] * size : size, column : shape[2] * size : size]


def _convolved(x, kernel, b, side, arena):
    """Return x's windows times the kernel, plus b.    kernel: (S S C, N); result: (B, H, W, N)"""
    y = arena.take((*x.shape[:3], kernel.shape[1]), x.dtype)
    flat = y.reshape(-1, kernel.shape[1])
    for rows, windows in _tiles(x, side, arena):
        put_product(windows, kernel, flat[rows], False, arena)
        if b is not None:
            flat[rows] += b
    return y


def _tiles(x, side, arena) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield (rows of the flat output, windows (rows, S S C)) of each tile.

    The next tile overwrites the windows. x: (B, H, W, C), with any strides.
    """
    images, height, width, channels = x.shape
    if not images:
        return
    band = max(1, TILE_BYTES // (width * side * side * channels * x.itemsize))
    together, band = min(images, max(1, band // height)), min(band, height)
    around = arena.take((together, band + side - 1, width + side - 1, channels), x.dtype)
    windows = arena.take((together * band * width, side * side * channels), x.dtype)
    corners = [
        (image, top) for image in range(0, images, together) for top in range(0, height, band)
    ]
    for number in rounds(range(len(corners)), x):
        image, top = corners[number]
        count, rows = min(together, images - image), min(band, height - top)
        first = (image * height + top) * width
        tile = windows[: count * rows * width]
        if has_memory(x):
            _copy_windows(x[image : image + count], top, rows, side, around[:count], tile)
        yield slice(first, first + len(tile)), tile


def _copy_windows(x, top, rows, side, around, windows):
    """Copy the windows of rows `top` on, by an image with zeros around it.

    x: (n, H, W, C); around: (n, rows + S - 1 or more, W + S - 1, C); windows: (n rows W, S S C)
    """
    (_, height, width, channels), border = x.shape, side // 2
    first, end = max(0, top - border), min(height, top + rows + border)
    around.fill(0)
    shift = border - top
    around[:, first + shift : end + shift, border : border + width] = x[:, first:end]
    step_n, step_h, step_w, step_c = around.strides
    view = np.lib.stride_tricks.as_strided(
        around,
        (len(x), rows, width, side, side, channels),
        (step_n, step_h, step_w, step_h, step_w, step_c),
        writeable=False,
    )
    np.copyto(windows.reshape(view.shape), view)


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


WITH_PASSES = gelu, layer_norm, layer_norm_backward_input, linear_gelu
"""The operations that take `passes_of` first (passes.py)."""
