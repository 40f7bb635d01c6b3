"""Operations with a compiled pass, in place of the bodies of the same names in `layers`.

The library of passes.cpp is built once per processor and compiler, and loaded once per process. The
states for the backward are those of `layers`. Arrays of another type than float32, or with gaps, go
to its bodies. M rows, C channels, K inputs, N outputs.
"""

import ctypes
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.machine.backend import host_address
from mpitrain.machine.compiling import (
    cache_of,
    compile_cpp,
    compiler,
    locked,
    processor_and_compiler,
)
from mpitrain.ops.host import layers
from mpitrain.ops.host.product import put_product
from mpitrain.ops.reference.layers import GELU_CUBIC, GELU_SCALE
from mpitrain.ops.weightless import has_memory

SOURCE = Path(__file__).with_name("passes.cpp")
INSTEAD = "set device.passes to numpy"
FLAGS = (
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)
SIZE, ARRAY, NUMBER = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
SIGNATURES: dict[str, list[Any]] = {
    "gelu": [SIZE, SIZE, *[ARRAY] * 3, NUMBER, NUMBER],
    "layer_norm": [SIZE, SIZE, *[ARRAY] * 3, NUMBER, *[ARRAY] * 3],
    "layer_norm_backward": [SIZE, SIZE, *[ARRAY] * 9],
}


@cache
def library() -> ctypes.CDLL:
    """Return the library; compile it if it is missing.

    raises  ConfigError without a compiler, KernelError if it refuses the source
    """
    compiler("device.passes compiled compiles C++", INSTEAD)
    folder = cache_of("passes")
    key = "\0".join([SOURCE.read_text(encoding="utf-8"), *FLAGS, processor_and_compiler()])
    target = folder / f"passes-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        with locked(target, SOURCE.name):
            if not target.exists():
                way_out = f"{INSTEAD.capitalize()}, or install another compiler."
                compile_cpp([*FLAGS, str(SOURCE)], target, SOURCE.name, way_out)
    passes = ctypes.CDLL(str(target))
    for name, types in SIGNATURES.items():
        getattr(passes, name).argtypes, getattr(passes, name).restype = types, None
    return passes


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
    if not _are_plain(x, w, b):
        return layers.linear_gelu(x, w, b, arena)
    y = arena.take((len(x), len(w)), x.dtype)
    put_product(x, w.T, y, False, arena)
    return y, (x, _gelu(y, b, arena))


def gelu(z, arena):
    if not _are_plain(z):
        return layers.gelu(z, arena)
    return z, _gelu(z.reshape(-1, z.shape[-1]), None, arena).reshape(z.shape)


def _gelu(y, b, arena):
    """Replace y by gelu(y + b), and return the slope.    y, slope: (M, C); b: (C,) or None"""
    slope, cubic = arena.take(y.shape, y.dtype), GELU_SCALE * GELU_CUBIC
    if has_memory(y):
        library().gelu(*y.shape, _address(y), _address(b), _address(slope), GELU_SCALE, cubic)
    return slope


def layer_norm(x, gain, bias, epsilon, arena):
    if not _are_plain(x, gain, bias):
        return layers.layer_norm(x, gain, bias, epsilon, arena)
    y, normal = arena.take(x.shape, x.dtype), arena.take(x.shape, x.dtype)
    inverse = arena.take((len(x), 1), x.dtype)
    if has_memory(x):
        library().layer_norm(
            *x.shape, *map(_address, (x, gain, bias)), epsilon, *map(_address, (y, normal, inverse))
        )
    return y, (normal, inverse)


def layer_norm_backward_input(dy, gain, saved, arena, residual=None):
    if not _are_plain(dy, gain, *saved, residual):
        return layers.layer_norm_backward_input(dy, gain, saved, arena, residual)
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
