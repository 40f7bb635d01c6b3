"""Tensor-wise optimizer steps in blocks that stay in cache; sums over tensors are float64."""

import numpy as np

from mpitrain.ops.host.blocks import row_blocks
from mpitrain.ops.host.product import put_product
from mpitrain.ops.host.steps import _step_moments, _write
from mpitrain.ops.reference.tensor_steps import LEAST_NORM, LEAST_RMS, NEWTON_SCHULZ


def add_squares(x, squares, arena):
    """Add the sum of the squares of x (count,) to squares (1,)."""
    for block in row_blocks(x):
        squares += _squares(x[block], arena)


def lamb_moments(p, g, m, v, squares, scale, beta1, beta2, eps, weight_decay, step, arena):
    """Step m and v in place; add the squares of p and of the update to squares (2,)."""
    for block in row_blocks(p):
        mean, square = m[block], v[block]
        part = arena.take(p[block].shape, p.dtype)
        _step_moments(mean, square, g[block], scale, beta1, beta2, part)
        update = _lamb_update(p[block], mean, square, beta1, beta2, eps, weight_decay, step, arena)
        squares += [_squares(p[block], arena), _squares(update, arena)]


def lamb(p, m, v, squares, lr, beta1, beta2, eps, weight_decay, step, arena, mirror=None):
    """Step p in place.    p, m, v: (count,); squares: (2,)"""
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
    """Add the squares of scale g (R, C) to the sums of its rows and columns."""
    for block in row_blocks(g):
        squares = np.multiply(g[block], scale, out=arena.take(g[block].shape, np.float64))
        squares *= squares
        if rows is not None:
            row_squares[rows[block]] += squares.sum(axis=1)
        column_squares[columns] += np.ones(len(squares)) @ squares


def adafactor_update(g, rows, columns, row_factors, column_factors, squares, scale, eps, arena):
    """Add the squares of scale g / sqrt(variance) to squares (1,).    g: (R, C)"""
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
    """Step p in place.    p, g, mirror: (R, C)"""
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
    """Step m in place, and write Nesterov's momentum to out.    g, m, out: (count,)"""
    for block in row_blocks(g):
        part = np.multiply(
            g[block], (1 - momentum) * scale, out=arena.take(g[block].shape, g.dtype)
        )
        m[block] *= momentum
        m[block] += part
        np.multiply(m[block], momentum, out=out[block])
        out[block] += part


def newton_schulz(x, steps, arena):
    """Replace x (M, N) by nearly the nearest semi-orthogonal matrix."""
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
    """Step p in place.    p, update: (count,)"""
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
