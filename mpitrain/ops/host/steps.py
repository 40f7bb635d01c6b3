"""Optimizer steps and sums over flat buffers, in one pass: each block is finished while it is in
cache.
"""

import math
from collections.abc import Callable
from functools import wraps

import numpy as np

from mpitrain.ops.codes import BLOCK, SIGNED, TINY, UNSIGNED
from mpitrain.ops.host.blocks import row_blocks

MAPS = SIGNED, UNSIGNED
"""Codes of the first and of the second moment."""


def in_blocks(step: Callable[..., None]) -> Callable[..., None]:
    """Return a step that runs a definition block by block, so its temporaries stay in the cache."""

    @wraps(step)
    def run(p, *arguments, **named):
        for block in row_blocks(p):
            step(
                p[block],
                *(value[block] if isinstance(value, np.ndarray) else value for value in arguments),
                **{
                    name: value[block] if isinstance(value, np.ndarray) else value
                    for name, value in named.items()
                },
            )

    return run


def sgd(p, g, scale, lr, weight_decay, arena, mirror=None):
    """Step p in place.    p, g: (count,)"""
    for block in row_blocks(p):
        step = np.multiply(g[block], lr * scale, out=arena.take(g[block].shape, p.dtype))
        p[block] *= 1 - lr * weight_decay
        p[block] -= step
        _write(mirror, p, block)


def momentum(p, g, m, scale, lr, beta, weight_decay, arena, mirror=None):
    """Step p and m in place.    p, g, m: (count,)"""
    for block in row_blocks(p):
        part = arena.take(p[block].shape, p.dtype)
        m[block] *= beta
        m[block] += np.multiply(g[block], scale, out=part)
        if weight_decay:
            m[block] += np.multiply(p[block], weight_decay, out=part)
        p[block] -= np.multiply(m[block], lr, out=part)
        _write(mirror, p, block)


def nesterov(p, g, m, scale, lr, beta, weight_decay, arena, mirror=None):
    """Step p and m in place.    p, g, m: (count,)"""
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
    """Step p and m in place.    p, g, m: (count,)"""
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
    """Step p, m and v in place, with coupled decay.    p, g, m, v: (count,)"""
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
    """Step p, m and v in place.    p, g, m, v: (count,)"""
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
    """Step p in place as adamw, with moments in codes.    p, g, m, v: (count,)"""
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
