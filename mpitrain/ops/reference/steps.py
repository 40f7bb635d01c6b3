"""The definition of the operations of an update: optimizer steps and gradient statistics.

mirror: None, or (count,), which receives the parameters, rounded to its dtype.
"""

import numpy as np

from mpitrain.ops import codes


def sgd(p, g, scale, lr, weight_decay, arena, mirror=None):
    """Step p in place: p -= lr (scale g + weight_decay p).

    p, g: (count,); scale: the factor on gradients that comes from clipping and loss scaling
    """
    p -= lr * (scale * g + weight_decay * p)
    _write(mirror, p)


def momentum(p, g, m, scale, lr, beta, weight_decay, arena, mirror=None):
    """Step p and m in place: m = beta m + scale g + weight_decay p, p -= lr m.

    p, g, m: (count,); m starts at 0
    """
    m *= beta
    m += scale * g + weight_decay * p
    p -= lr * m
    _write(mirror, p)


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


def gradient_facts(x, arena):
    """Return (sum of squares, accumulated in float64; number of infinite or NaN elements).

    x: (count,)
    """
    return float(np.square(x, dtype=np.float64).sum()), float(x.size - np.isfinite(x).sum())
