"""The definition of the operations of an update: optimizer steps and gradient statistics.

LAMB, Adafactor and Muon are tensor-wise. Their sums over tensors, of any float dtype, are float64 in
a run. An operation adds the share of its own elements to them. A tensor with one dim has no rows:
`rows` and arrays of its rows are None.

mirror: None, or (count,), which receives the parameters, rounded to its dtype.
"""

import numpy as np

from mpitrain.ops import codes
from mpitrain.ops.table import operation


@operation("p:L g:L scale=0.7 lr=0.1 weight_decay=0.01 -> p", "mirror")
def sgd(p, g, scale, lr, weight_decay, arena, mirror=None):
    """Step p in place: p -= lr (scale g + weight_decay p).

    p, g: (count,); scale: the factor on gradients that comes from clipping and loss scaling
    """
    p -= lr * (scale * g + weight_decay * p)
    _write(mirror, p)


@operation("p:L g:L m:L scale=0.7 lr=0.1 beta=0.9 weight_decay=0.01 -> p m", "mirror")
def momentum(p, g, m, scale, lr, beta, weight_decay, arena, mirror=None):
    """Step p and m in place: m = beta m + scale g + weight_decay p, p -= lr m.

    p, g, m: (count,); m starts at 0
    """
    m *= beta
    m += scale * g + weight_decay * p
    p -= lr * m
    _write(mirror, p)


@operation("p:L g:L m:L scale=0.7 lr=0.1 beta=0.9 weight_decay=0.01 -> p m", "mirror")
def nesterov(p, g, m, scale, lr, beta, weight_decay, arena, mirror=None):
    """Step p and m in place, with Nesterov momentum.

        d  = scale g + weight_decay p
        m  = beta m + d
        p -= lr (d + beta m)

    p, g, m: (count,); m starts at 0
    source  Sutskever et al. 2013, section 2, in the form of torch.optim.SGD(nesterov=True)
    """
    d = scale * g + weight_decay * p
    m *= beta
    m += d
    p -= lr * (d + beta * m)
    _write(mirror, p)


@operation("p:L g:L m:L scale=0.7 lr=0.1 beta1=0.9 beta2=0.99 weight_decay=0.1 -> p m", "mirror")
def lion(p, g, m, scale, lr, beta1, beta2, weight_decay, arena, mirror=None):
    """Step p and m in place: p -= lr (sign(beta1 m + (1 - beta1) scale g) + weight_decay p).

    Then m = beta2 m + (1 - beta2) scale g.

    p, g, m: (count,); m starts at 0
    source  Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2
    """
    g = scale * g
    p -= lr * (np.sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)
    m += (1 - beta2) * (g - m)
    _write(mirror, p)


@operation(
    "p:L g:L m:L v>0:L scale=0.7 lr=0.1 beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1 "
    "step=3 -> p m v",
    "mirror",
)
def adam(p, g, m, v, scale, lr, beta1, beta2, eps, weight_decay, step, arena, mirror=None):
    """Step p, m and v in place, with the decay in the gradient (L2 regularisation).

    p, g, m, v: (count,); m and v start at 0; step counts from 1
    source  Kingma & Ba 2015, algorithm 1, in the form of torch.optim.Adam
    """
    g = scale * g + weight_decay * p
    m += (1 - beta1) * (g - m)
    v += (1 - beta2) * (g * g - v)
    p -= lr / (1 - beta1**step) * m / (np.sqrt(v / (1 - beta2**step)) + eps)
    _write(mirror, p)


@operation(
    "p:L g:L m:L v>0:L scale=0.7 lr=0.1 beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1 "
    "step=3 -> p m v",
    "mirror",
)
def adamw(p, g, m, v, scale, lr, beta1, beta2, eps, weight_decay, step, arena, mirror=None):
    """Step p, m and v in place, with decoupled weight decay.

    p, g, m, v: (count,); m and v start at 0; step counts from 1
    source  Loshchilov & Hutter 2019, algorithm 2 with lr in the decay
    """
    g = scale * g
    m += (1 - beta1) * (g - m)
    v += (1 - beta2) * (g * g - v)
    p *= 1 - lr * weight_decay
    p -= lr / (1 - beta1**step) * m / (np.sqrt(v / (1 - beta2**step)) + eps)
    _write(mirror, p)


@operation(
    "p:L g:L m%:L v%:L m_scales>0:L|0 v_scales>0:L|0 scale=0.7 lr=0.1 beta1=0.9 beta2=0.95 "
    "eps=1e-08 weight_decay=0.1 step=3 lead=32 -> p m v",
    "mirror",
)
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
    """Step p in place as adamw, with moments in codes of 8 bits (ops/codes.py).

    p, g: (count,); m, v: (count,) uint8; m_scales, v_scales: as p, at least one for each block
    lead  elements that the first block of 256 lacks: a multiple of 32
    """
    blocks = codes.block_count(len(p), lead)
    mean = codes.decode(m, m_scales[:blocks], lead, codes.SIGNED, p.dtype)
    square = codes.decode(v, v_scales[:blocks], lead, codes.UNSIGNED, p.dtype)
    adamw(p, g, mean, square, scale, lr, beta1, beta2, eps, weight_decay, step, arena, mirror)
    m[:], m_scales[:blocks] = codes.encode(mean, lead, codes.SIGNED)
    v[:], v_scales[:blocks] = codes.encode(square, lead, codes.UNSIGNED)


def _write(mirror, p):
    if mirror is not None:
        mirror[...] = p


@operation("x:L -> squares nonfinite", "nothing", launches=2)
def gradient_facts(x, arena):
    """Return (sum of squares; number of infinite or NaN elements).

    The sum is accumulated in float64, perhaps of sums of 8 float32 squares: an error below 1e-6.
    x: (count,)
    """
    return float(np.square(x, dtype=np.float64).sum()), float(x.size - np.isfinite(x).sum())


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Jordan et al. 2024)."""
LEAST_NORM = 1e-7
"""Lower bound of the norm by which Muon divides a matrix before its Newton-Schulz iteration."""


@operation("x:L squares:1 -> squares", "nothing", launches=2)
def add_squares(x, squares, arena):
    """Add the sum of the squares of x (count,) to squares (1,)."""
    squares += np.square(x, dtype=np.float64).sum()


@operation(
    "p:L g:L m:L v>0:L squares:2 scale=0.7 beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1 "
    "step=3 -> m v squares",
    "nothing",
    launches=2,
)
def lamb_moments(p, g, m, v, squares, scale, beta1, beta2, eps, weight_decay, step, arena):
    """Step both moments, and add the squares of parameters and of the update to `squares`.

    p, g, m, v: (count,); squares: (2,); step counts from 1
    source  You et al. 2020, Large Batch Optimization for Deep Learning, algorithm 2
    """
    g = scale * g
    m += (1 - beta1) * (g - m)
    v += (1 - beta2) * (g * g - v)
    update = _lamb_update(p, m, v, beta1, beta2, eps, weight_decay, step)
    squares += [np.square(x, dtype=np.float64).sum() for x in (p, update)]


@operation(
    "p:L m:L v>0:L squares>0:2 lr=0.1 beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1 step=3 -> p",
    "mirror",
)
def lamb(p, m, v, squares, lr, beta1, beta2, eps, weight_decay, step, arena, mirror=None):
    """Step p in place: p -= lr |p| / |update| update; the ratio is 1 where a norm is 0.

    p, m, v: (count,); squares: (2,), those of the whole tensor
    """
    ratio = np.sqrt(squares[0] / squares[1]) if squares.all() else 1.0
    p -= lr * ratio * _lamb_update(p, m, v, beta1, beta2, eps, weight_decay, step)
    _write(mirror, p)


def _lamb_update(p, m, v, beta1, beta2, eps, weight_decay, step):
    update = m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + eps)
    return update + weight_decay * p


@operation(
    "g:M,N rows<M!:M columns<N!:N row_squares:M column_squares:N scale=0.7 -> row_squares "
    "column_squares",
    "nothing",
    launches=3,
)
def adafactor_squares(g, rows, columns, row_squares, column_squares, scale, arena):
    """Add the squares of scale g to the sums of its rows and columns in the whole tensor.

    g: (R, C); rows: (R,) and columns: (C,), indices in the sums, each once
    """
    squares = np.square(scale * g, dtype=np.float64)
    if rows is not None:
        row_squares[rows] += squares.sum(axis=1)
    column_squares[columns] += squares.sum(axis=0)


@operation(
    "row>0:K column>0:N row_squares>0:K column_squares>0:N weight=0.3 eps=1e-08 -> row "
    "column row_squares column_squares",
    "nothing",
)
def adafactor_variances(row, column, row_squares, column_squares, weight, eps, arena):
    """Step the factored variance, and overwrite the sums by the factors of its estimate.

    The estimate of element (r, c) is row_squares[r] column_squares[c].
    row, row_squares: (R,); column, column_squares: (C,); weight: of the new squares
    """
    if row is not None:
        row += weight * (row_squares / len(column) - row)
        column_squares /= len(row)
        row_squares[...] = row / np.maximum(row.mean(dtype=np.float64), eps)
    column += weight * (column_squares - column)
    column_squares[...] = column


@operation(
    "g:M,N rows<M!:M columns<N!:N row_factors>0:M column_factors>0:N squares:1 scale=0.7 "
    "eps=1e-08 -> squares",
    "nothing",
    launches=2,
)
def adafactor_update(g, rows, columns, row_factors, column_factors, squares, scale, eps, arena):
    """Add the squares of scale g / sqrt(variance) to squares (1,).

    g: (R, C); rows, columns: as in `adafactor_squares`; variances are at least eps^2
    """
    update = _adafactor_update(g, rows, columns, row_factors, column_factors, scale, eps)
    squares += np.square(update, dtype=np.float64).sum()


@operation(
    "p:M,N g:M,N rows<M!:M columns<N!:N row_factors>0:M column_factors>0:N "
    "parameter_squares>0:1 update_squares>0:1 count=21 scale=0.7 lr=0.1 rate=0.05 eps=1e-08 "
    "weight_decay=0.1 -> p",
    "mirror",
)
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
    """Step p in place: p = (1 - lr weight_decay) p - alpha u / max(1, RMS(u)).

    Here alpha = max(0.001, RMS(p)) rate, with the roots of means over the `count` elements of the
    whole tensor.
    p, g, mirror: (R, C); both squares: (1,); the others as in `adafactor_update`
    source  Shazeer & Stern 2018, Adafactor; as torch.optim.Adafactor
    """
    alpha = np.maximum(LEAST_RMS, np.sqrt(parameter_squares / count)) * rate
    update = _adafactor_update(g, rows, columns, row_factors, column_factors, scale, eps)
    p *= 1 - lr * weight_decay
    p -= alpha / np.maximum(1, np.sqrt(update_squares / count)) * update
    _write(mirror, p)


LEAST_RMS = 1e-3
"""Lower bound of the root mean square of a tensor in Adafactor's relative step."""


def _adafactor_update(g, rows, columns, row_factors, column_factors, scale, eps):
    variance = column_factors[columns]
    if rows is not None:
        variance = np.outer(row_factors[rows], variance)
    return scale * g / np.sqrt(np.maximum(variance, eps * eps))


@operation("g:L m:L out:L|0 scale=0.7 momentum=0.9 -> m out", "nothing")
def muon_momentum(g, m, out, scale, momentum, arena):
    """Step m in place, and write Nesterov's momentum to out.

    With g scaled: m += (1 - momentum) (g - m), out = g + momentum (m - g).
    g, m, out: (count,)
    """
    g = scale * g
    m += (1 - momentum) * (g - m)
    out[...] = g + momentum * (m - g)


@operation("x:K,N steps=2 -> x", "nothing", launches=9)
def newton_schulz(x, steps, arena):
    """Replace a matrix by nearly the nearest semi-orthogonal one.

    Each step is x = a x + (b A + c A A) x with A = x x^T. The norm of x is 1 at first.
    x: (M, N)
    source  Jordan et al. 2024, Muon; as torch.optim.Muon, but in the dtype of x
    """
    a, b, c = NEWTON_SCHULZ
    y = x if len(x) <= x.shape[1] else x.T
    y /= np.maximum(np.sqrt(np.square(y, dtype=np.float64).sum()), LEAST_NORM)
    for _ in range(steps):
        gram = y @ y.T
        y[...] = a * y + (b * gram + c * gram @ gram) @ y


@operation("p:L update:L lr=0.1 ratio=1.5 weight_decay=0.1 -> p", "mirror")
def muon(p, update, lr, ratio, weight_decay, arena, mirror=None):
    """Step p in place: p = (1 - lr weight_decay) p - lr ratio update.

    p, update: (count,)
    """
    p *= 1 - lr * weight_decay
    p -= lr * ratio * update
    _write(mirror, p)
