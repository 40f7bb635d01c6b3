"""Optimizer steps and sums over flat buffers, in one pass: each block is finished while it is in
cache. Sums over tensors are float64.
"""

import math

import numpy as np

from mpitrain.ops.codes import BLOCK, SIGNED, TINY, UNSIGNED
from mpitrain.ops.host.product import put_product, row_blocks
from mpitrain.ops.reference.steps import LEAST_NORM, LEAST_RMS, NEWTON_SCHULZ

MAPS = SIGNED, UNSIGNED
"""Codes of the first and of the second moment."""


def sgd(p, g, scale, lr, weight_decay, arena, mirror=None):
    for block in row_blocks(p):
        step = np.multiply(g[block], lr * scale, out=arena.take(g[block].shape, p.dtype))
        p[block] *= 1 - lr * weight_decay
        p[block] -= step
        _write(mirror, p, block)


def momentum(p, g, m, scale, lr, beta, weight_decay, arena, mirror=None):
    for block in row_blocks(p):
        part = arena.take(p[block].shape, p.dtype)
        m[block] *= beta
        m[block] += np.multiply(g[block], scale, out=part)
        if weight_decay:
            m[block] += np.multiply(p[block], weight_decay, out=part)
        p[block] -= np.multiply(m[block], lr, out=part)
        _write(mirror, p, block)


def nesterov(p, g, m, scale, lr, beta, weight_decay, arena, mirror=None):
    for block in row_blocks(p):
        gradient, part = (arena.take(p[block].shape, p.dtype) for _ in range(2))
        _coupled(gradient, p[block], g[block], scale, weight_decay, part)
        m[block] *= beta
        m[block] += gradient
        gradient += np.multiply(m[block], beta, out=part)
        gradient *= lr
        p[block] -= gradient
        _write(mirror, p, block)


def lion(p, g, m, scale, lr, beta1, beta2, weight_decay, arena, mirror=None):
    for block in row_blocks(p):
        gradient, part = (arena.take(p[block].shape, p.dtype) for _ in range(2))
        np.multiply(g[block], (1 - beta1) * scale, out=gradient)
        gradient += np.multiply(m[block], beta1, out=part)
        np.sign(gradient, out=gradient)
        gradient *= lr
        if weight_decay:
            p[block] *= 1 - lr * weight_decay
        p[block] -= gradient
        m[block] *= beta2
        m[block] += np.multiply(g[block], (1 - beta2) * scale, out=part)
        _write(mirror, p, block)


def adam(p, g, m, v, scale, lr, beta1, beta2, eps, weight_decay, step, arena, mirror=None):
    for block in row_blocks(p):
        gradient, part = (arena.take(p[block].shape, p.dtype) for _ in range(2))
        _coupled(gradient, p[block], g[block], scale, weight_decay, part)
        adamw(p[block], gradient, m[block], v[block], 1, lr, beta1, beta2, eps, 0, step, arena)
        _write(mirror, p, block)


def _coupled(out, p, g, scale, weight_decay, part):
    """Write scale g + weight_decay p to `out`; `part` is overwritten."""
    np.multiply(g, scale, out=out)
    if weight_decay:
        out += np.multiply(p, weight_decay, out=part)


def adamw(p, g, m, v, scale, lr, beta1, beta2, eps, weight_decay, step, arena, mirror=None):
    # The step is lr m' / (sqrt(v') + eps). Two scalars take the bias corrections of m' and v'.
    root = (1 - beta2**step) ** 0.5
    rate, eps = lr / (1 - beta1**step) * root, eps * root
    for block in row_blocks(p):
        part = arena.take(p[block].shape, p.dtype)
        _step_moments(m[block], v[block], g[block], scale, beta1, beta2, part)
        np.sqrt(v[block], out=part)
        part += eps
        np.divide(m[block], part, out=part)
        part *= rate
        if weight_decay:
            p[block] *= 1 - lr * weight_decay
        p[block] -= part
        _write(mirror, p, block)


def _step_moments(m, v, g, scale, beta1, beta2, part):
    """Step m and v of a block in place; `part` is overwritten."""
    m *= beta1
    m += np.multiply(g, (1 - beta1) * scale, out=part)
    np.multiply(g, (1 - beta2) ** 0.5 * scale, out=part)
    part *= part
    v *= beta2
    v += part


def adamw8bit(
    p,
    g,
    m,
    v,
    m_scales,
    v_scales,
    scale,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    step,
    lead,
    arena,
    mirror=None,
):
    for elements, block in _runs_of_blocks(p.size, lead):
        shape = (
            block.stop - block.start,
            (elements.stop - elements.start) // (block.stop - block.start),
        )
        mean, square = (arena.take(shape, p.dtype) for _ in range(2))
        moments = (mean, m[elements], m_scales[block]), (square, v[elements], v_scales[block])
        for (values, coded, scales), of in zip(moments, MAPS, strict=True):
            numbers = arena.take(shape, np.float32)
            np.take(of.values, coded.reshape(shape), out=numbers, mode="clip")
            np.multiply(numbers, scales[:, None], out=values, dtype=values.dtype)
        adamw(
            p[elements],
            g[elements],
            mean.reshape(-1),
            square.reshape(-1),
            scale,
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
            step,
            arena,
            None if mirror is None else mirror[elements],
        )
        for (values, coded, scales), of in zip(moments, MAPS, strict=True):
            _encode(values, coded, scales, of, arena)


def _runs_of_blocks(count, lead):
    """Yield (elements, blocks) of runs of 64 whole blocks, and of the short ones at the ends."""
    first = min(count, (BLOCK - lead) % BLOCK)
    whole = (count - first) // BLOCK
    if first:
        yield slice(0, first), slice(0, 1)
    shift = int(first > 0)
    for start in range(0, whole, 64):
        stop = min(start + 64, whole)
        yield (
            slice(first + start * BLOCK, first + stop * BLOCK),
            slice(shift + start, shift + stop),
        )
    if first + whole * BLOCK < count:
        yield slice(first + whole * BLOCK, count), slice(shift + whole, shift + whole + 1)


def _encode(values, coded, scales, of, arena):
    """Write the codes of values (blocks, elements) to coded (count,), and scales (blocks,)."""
    ratio = arena.take(values.shape, np.float32)
    np.abs(values, out=ratio, casting="same_kind")
    np.max(ratio, axis=1, out=scales)
    scales[scales < TINY] = 0
    ratio[...] = values
    ratio /= np.where(scales > 0, scales, np.inf).astype(np.float32)[:, None]
    # This is the upper half of a little-endian float32.
    upper = ratio.view(np.uint16)[:, 1::2]
    codes, bound = (arena.take(values.shape, kind) for kind in (np.uint8, np.float32))
    np.take(of.lowest, upper, out=codes, mode="clip")
    np.take(of.bounds, codes, out=bound, mode="clip")
    codes += ratio > bound
    coded[...] = codes.reshape(-1)


def _write(mirror, p, block):
    if mirror is not None:
        mirror[block] = p[block]


def gradient_facts(x, arena):
    """Return (sum of squares in float64, number of infinite or NaN elements).

    The count takes a second pass, only if the sum is not finite.
    x: (count,)
    """
    squares = 0.0
    for block in row_blocks(x):
        wide = arena.take(x[block].shape, np.float64)
        wide[...] = x[block]
        squares += float(wide @ wide)
    if math.isfinite(squares):
        return squares, 0.0
    return squares, float(
        x.size - sum(int(np.count_nonzero(np.isfinite(x[block]))) for block in row_blocks(x))
    )


def add_squares(x, squares, arena):
    for block in row_blocks(x):
        squares += _squares(x[block], arena)


def lamb_moments(p, g, m, v, squares, scale, beta1, beta2, eps, weight_decay, step, arena):
    for block in row_blocks(p):
        mean, square = m[block], v[block]
        part = arena.take(p[block].shape, p.dtype)
        _step_moments(mean, square, g[block], scale, beta1, beta2, part)
        update = _lamb_update(p[block], mean, square, beta1, beta2, eps, weight_decay, step, arena)
        squares += [_squares(p[block], arena), _squares(update, arena)]


def lamb(p, m, v, squares, lr, beta1, beta2, eps, weight_decay, step, arena, mirror=None):
    rate = lr * float(np.sqrt(squares[0] / squares[1]) if squares.all() else 1.0)
    for block in row_blocks(p):
        update = _lamb_update(
            p[block], m[block], v[block], beta1, beta2, eps, weight_decay, step, arena
        )
        update *= rate
        p[block] -= update
        _write(mirror, p, block)


def _lamb_update(p, m, v, beta1, beta2, eps, weight_decay, step, arena):
    """Return the update of a block before its trust ratio."""
    root = (1 - beta2**step) ** 0.5
    update = np.sqrt(v, out=arena.take(p.shape, p.dtype))
    update += eps * root
    np.divide(m, update, out=update)
    update *= root / (1 - beta1**step)
    if weight_decay:
        update += np.multiply(p, weight_decay, out=arena.take(p.shape, p.dtype))
    return update


def adafactor_squares(g, rows, columns, row_squares, column_squares, scale, arena):
    for block in row_blocks(g):
        squares = np.multiply(g[block], scale, out=arena.take(g[block].shape, np.float64))
        squares *= squares
        if rows is not None:
            row_squares[rows[block]] += squares.sum(axis=1)
        column_squares[columns] += np.ones(len(squares)) @ squares


def adafactor_update(g, rows, columns, row_factors, column_factors, squares, scale, eps, arena):
    for _, update in _updates(g, rows, columns, row_factors, column_factors, scale, eps, arena):
        flat = update.reshape(-1)
        squares += float(flat @ flat)


def adafactor(
    p,
    g,
    rows,
    columns,
    row_factors,
    column_factors,
    parameter_squares,
    update_squares,
    count,
    scale,
    lr,
    rate,
    eps,
    weight_decay,
    arena,
    mirror=None,
):
    before, step = (float(np.sqrt(x.item() / count)) for x in (parameter_squares, update_squares))
    alpha = max(LEAST_RMS, before) * rate / max(1.0, step)
    for block, update in _updates(g, rows, columns, row_factors, column_factors, scale, eps, arena):
        update *= alpha
        if weight_decay:
            p[block] *= 1 - lr * weight_decay
        p[block] -= update
        _write(mirror, p, block)


def _updates(g, rows, columns, row_factors, column_factors, scale, eps, arena):
    """Yield (block of rows, update before its clipping) in float64."""
    along = column_factors[columns]
    for block in row_blocks(g):
        update = arena.take(g[block].shape, np.float64)
        if rows is None:
            update[...] = along
        else:
            np.multiply(row_factors[rows[block]][:, None], along, out=update)
        np.maximum(update, eps * eps, out=update)
        np.sqrt(update, out=update)
        np.divide(g[block], update, out=update)
        update *= scale
        yield block, update


def muon_momentum(g, m, out, scale, momentum, arena):
    for block in row_blocks(g):
        part = np.multiply(
            g[block], (1 - momentum) * scale, out=arena.take(g[block].shape, g.dtype)
        )
        m[block] *= momentum
        m[block] += part
        np.multiply(m[block], momentum, out=out[block])
        out[block] += part


def newton_schulz(x, steps, arena):
    a, b, c = NEWTON_SCHULZ
    is_wide, side = len(x) <= x.shape[1], min(x.shape)
    squares = np.zeros(1)
    add_squares(x.reshape(-1), squares, arena)
    x /= max(float(np.sqrt(squares[0])), LEAST_NORM)
    gram, polynomial = arena.take((2, side, side), x.dtype)
    product = arena.take(x.shape, x.dtype)
    for _ in range(steps):
        put_product(*((x, x.T) if is_wide else (x.T, x)), gram, False, arena)
        put_product(gram, gram, polynomial, False, arena)
        polynomial *= c
        gram *= b
        polynomial += gram
        put_product(*((polynomial, x) if is_wide else (x, polynomial)), product, False, arena)
        x *= a
        x += product


def muon(p, update, lr, ratio, weight_decay, arena, mirror=None):
    for block in row_blocks(p):
        part = np.multiply(update[block], lr * ratio, out=arena.take(p[block].shape, p.dtype))
        if weight_decay:
            p[block] *= 1 - lr * weight_decay
        p[block] -= part
        _write(mirror, p, block)


def _squares(x, arena):
    """Return the sum of squares of a flat array, in float64."""
    wide = arena.take(x.shape, np.float64)
    wide[...] = x
    return float(wide @ wide)
