"""Optimizer steps on flat buffers, in place."""

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.elements import element
from mpitrain.ops.cuda.grids import POINTWISE, blocks


def sgd(kernels: Kernels, p, g, scale, lr, weight_decay, arena):
    """p -= lr (scale g + weight_decay p)."""
    kernels.launch("sgd", blocks(p.size, 4), POINTWISE, (p.size, p, g, scale, lr, weight_decay), **element(p))


def momentum(kernels: Kernels, p, g, m, scale, lr, beta, weight_decay, arena):
    """m = beta m + scale g + weight_decay p, p -= lr m."""
    kernels.launch("momentum", blocks(p.size, 4), POINTWISE, (p.size, p, g, m, scale, lr, beta, weight_decay), **element(p))


def adamw(kernels: Kernels, p, g, m, v, scale, lr, beta1, beta2, eps, weight_decay, step, arena):
    """Decoupled decay, step counted from 1; what depends on the step alone is computed here in double."""
    kernels.launch("adamw", blocks(p.size, 4), POINTWISE,
                   (p.size, p, g, m, v, scale, lr, 1 - beta1, 1 - beta2, eps, weight_decay, 1 - beta1**step, 1 - beta2**step),
                   **element(p))
