"""Operations with a compiled pass, in place of the host's bodies of the same names.

The states for the backward are those of the host. Arrays of another type than float32, or with
gaps, go to the host's body. M rows, C channels, K inputs, N outputs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.machine.backend import host_address
from mpitrain.ops.compiled.library import library
from mpitrain.ops.host import linear as host_linear
from mpitrain.ops.host import norm as host_norm
from mpitrain.ops.host.product import put_product
from mpitrain.ops.reference.layers import GELU_CUBIC, GELU_SCALE
from mpitrain.ops.weightless import has_memory


def bodies() -> dict[str, Callable[..., Any]]:
    """Return the operations by name.

    raises  ConfigError or KernelError if this machine cannot compile them
    """
    library()
    return {
        "linear_gelu": linear_gelu,
        "gelu": gelu,
        "layer_norm": layer_norm,
        "layer_norm_backward_input": layer_norm_backward_input,
    }


def linear_gelu(x, w, b, arena):
    """Return (y, saved).    x: (M, K); w: (N, K); b: (N,) or None; y: (M, N)"""
    if not _are_plain(x, w, b):
        return host_linear.linear_gelu(x, w, b, arena)
    y = arena.take((len(x), len(w)), x.dtype)
    put_product(x, w.T, y, False, arena)
    return y, (x, _gelu(y, b, arena))


def gelu(z, arena):
    """Return (y, slope); y is written over z, of any shape."""
    if not _are_plain(z):
        return host_linear.gelu(z, arena)
    return z, _gelu(z.reshape(-1, z.shape[-1]), None, arena).reshape(z.shape)


def _gelu(y, b, arena):
    """Replace y by gelu(y + b), and return the slope.    y, slope: (M, C); b: (C,) or None"""
    slope, cubic = arena.take(y.shape, y.dtype), GELU_SCALE * GELU_CUBIC
    if has_memory(y):
        library().gelu(*y.shape, _address(y), _address(b), _address(slope), GELU_SCALE, cubic)
    return slope


def layer_norm(x, gain, bias, epsilon, arena):
    """Return (y, saved).    x, y: (M, C); gain, bias: (C,)"""
    if not _are_plain(x, gain, bias):
        return host_norm.layer_norm(x, gain, bias, epsilon, arena)
    y, normal = arena.take(x.shape, x.dtype), arena.take(x.shape, x.dtype)
    inverse = arena.take((len(x), 1), x.dtype)
    if has_memory(x):
        library().layer_norm(
            *x.shape, *map(_address, (x, gain, bias)), epsilon, *map(_address, (y, normal, inverse))
        )
    return y, (normal, inverse)


def layer_norm_backward_input(dy, gain, saved, arena, residual=None):
    """Return (dx, (dgain, dbias)).    dy, dx, residual: (M, C); gain, dgain, dbias: (C,)"""
    if not _are_plain(dy, gain, *saved, residual):
        return host_norm.layer_norm_backward_input(dy, gain, saved, arena, residual)
    dx = arena.take(dy.shape, dy.dtype)
    dgain, dbias, *part = arena.take((4, dy.shape[1]), dy.dtype)
    operands = (dy, gain, *saved, residual, dx, dgain, dbias, part[0])
    if has_memory(dy):
        library().layer_norm_backward(*dy.shape, *map(_address, operands))
    return dx, (dgain, dbias)


def _are_plain(*arrays):
    return all(
        one is None or (one.dtype == np.float32 and one.flags.c_contiguous) for one in arrays
    )


def _address(array):
    return None if array is None else host_address(array)
