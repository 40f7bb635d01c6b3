"""Operations with a compiled pass, in place of the bodies of the same names in `layers`.

passes.cpp becomes a library for float32 and one for float64, each built at first use on a processor.
The states for the backward are those of `layers`. Arrays of other types, or with gaps, go to its
bodies. M rows, C channels, K inputs, N outputs.
"""

import ctypes
import hashlib
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpitrain.errors import KernelError, MpitrainError, say
from mpitrain.files import contents, write_whole
from mpitrain.machine.backend import has_memory
from mpitrain.machine.compiling import (
    NO_COMPILER,
    cache_of,
    compile_cpp,
    compiled_once,
    compiler,
    has_compiler,
    loaded,
    processor_and_compiler,
)
from mpitrain.ops.host import attention, attention_tiled, layers
from mpitrain.ops.host.attention import forwards
from mpitrain.ops.host.product import SAFE, put_product
from mpitrain.ops.reference.layers import GELU_CUBIC, GELU_SCALE

SOURCE = Path(__file__).with_name("passes.cpp")
INSTEAD = "set device.passes to numpy, which rounds otherwise"
FLAGS = (
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-nostdlib",  # zig would compile its C++ library first, for a minute
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)
SIZE, ARRAY = ctypes.c_int64, ctypes.py_object
NUMBERS = {np.dtype("float32"): ctypes.c_float, np.dtype("float64"): ctypes.c_double}
"""The type of a number in C++, by dtype."""


REMEMBERED = 24 * 3600.0
"""Seconds for which no start tries again what the compiler refused. The reason may be a full disk."""
COMPILING = 300.0
"""Seconds in which the compiler must end. Then a run has not stalled yet (`run/watchdog.py`)."""


@cache
def library(dtype: np.dtype) -> ctypes.CDLL:
    """Return the library for float32 or float64; compile it if it is missing.

    raises  ConfigError without a compiler, KernelError if it refuses the source
    """
    compiler("device.passes compiled compiles C++", INSTEAD)
    number = NUMBERS[dtype]
    flags = [*FLAGS, f"-DREAL={number.__name__[2:]}", f"-DHEADER={object.__basicsize__}"]
    key = "\0".join([SOURCE.read_text(encoding="utf-8"), *flags, processor_and_compiler()])
    target = cache_of("passes") / f"passes-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    refusal = target.with_suffix(".failed")
    way_out = (
        f"{INSTEAD.capitalize()}; remove {refusal} to try again; or set XDG_CACHE_HOME to a folder "
        "from which the system runs code."
    )

    def compile(part: Path) -> None:
        if reason := _recent(refusal):
            raise KernelError(reason, way_out)
        say(f"compiling {SOURCE.name}, once on a machine")
        try:
            compile_cpp([*flags, str(SOURCE)], part, SOURCE.name, way_out, COMPILING)
            _bound(part, number, way_out)
        except KernelError as error:
            with suppress(OSError):
                write_whole(refusal, error.law)
            raise

    return _bound(compiled_once(target, SOURCE.name, compile), number, way_out)


def _recent(refusal: Path) -> str:
    """Return the reason for which a rank or start has failed of late; "" if none has."""
    with suppress(OSError):
        if 0 <= time.time() - refusal.stat().st_mtime < REMEMBERED:
            return contents(refusal).decode(errors="replace")
    return ""


def _bound(path: Path, number: type, way_out: str) -> ctypes.CDLL:
    """Load the library, whose functions take this type of C; KernelError if it is none."""
    passes = loaded(path, way_out)
    signatures: dict[str, list[Any]] = {
        "gelu": [SIZE, SIZE, number, number, *[ARRAY] * 3],
        "layer_norm": [SIZE, SIZE, number, *[ARRAY] * 6],
        "layer_norm_backward": [SIZE, SIZE, *[ARRAY] * 9],
        "weigh_tile": [*[SIZE] * 5, *[ARRAY] * 5],
        "weigh_block": [*[SIZE] * 5, number, number, *[ARRAY] * 4],
        "tile_backward": [*[SIZE] * 4, *[ARRAY] * 6],
        "block_backward": [*[SIZE] * 3, *[ARRAY] * 4],
    }
    try:
        ctypes.c_void_p.in_dll(passes, "none").value = id(None)
        for name, types in signatures.items():
            getattr(passes, name).argtypes, getattr(passes, name).restype = types, None
    except (AttributeError, ValueError) as error:
        raise KernelError(f"{path} is no library of {SOURCE.name}: {error}.", way_out) from None
    passes.weigh_block.restype = ctypes.c_int
    return passes


def lacks(stored: str) -> str:
    """Return the reason for which this process has no library for parameters of this type, or "".

    stored  "float32" or "float64"
    """
    if not has_compiler():
        return NO_COMPILER
    try:
        library(np.dtype(stored))
    except MpitrainError as error:
        return f"{error.law.rstrip('.')}. {error.way_out}"
    return ""


def bodies(attention: str = "auto") -> dict[str, Callable[..., Any]]:
    """Return the operations by name.

    attention  as memory.attention

    raises  ConfigError or KernelError if this machine cannot compile them
    """
    library(np.dtype("float32"))
    return {
        "linear_gelu": linear_gelu,
        "gelu": gelu,
        "layer_norm": layer_norm,
        "layer_norm_backward_input": layer_norm_backward_input,
        **forwards(attention, TILED, WHOLE)._asdict(),
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
        library(y.dtype).gelu(*y.shape, GELU_SCALE, cubic, y, b, slope)
    return slope


def layer_norm(x, gain, bias, epsilon, arena):
    if not _are_plain(x, gain, bias):
        return layers.layer_norm(x, gain, bias, epsilon, arena)
    y, normal = arena.take(x.shape, x.dtype), arena.take(x.shape, x.dtype)
    inverse = arena.take((len(x), 1), x.dtype)
    if has_memory(x):
        library(x.dtype).layer_norm(*x.shape, epsilon, x, gain, bias, y, normal, inverse)
    return y, (normal, inverse)


def layer_norm_backward_input(dy, gain, saved, arena, residual=None):
    if not _are_plain(dy, gain, *saved, residual):
        return layers.layer_norm_backward_input(dy, gain, saved, arena, residual)
    dx = arena.take(dy.shape, dy.dtype)
    dgain, dbias, *part = arena.take((4, dy.shape[1]), dy.dtype)
    operands = (dy, gain, *saved, residual, dx, dgain, dbias, part[0])
    if has_memory(dy):
        library(dy.dtype).layer_norm_backward(*dy.shape, *operands)
    return dx, (dgain, dbias)


def sum_values(tiles, fill):
    """As `attention_tiled.sum_values`."""
    for t in tiles:
        attention_tiled.put_scores(t, t.scores)
        if fill:
            fill(t.rows, t.keys, t.dropped)
        if has_memory(t.scores):
            library(t.scores.dtype).weigh_tile(
                *_rows_of(t.scores),
                t.end,
                t.is_first,
                *t.seen,
                t.scores,
                t.dropped if fill else None,
                t.sums,
            )
        if t.is_first:
            np.matmul(t.dropped, t.v, out=t.out)
        else:
            np.add(t.out, np.matmul(t.dropped, t.v, out=t.part), out=t.out)


def tile_backward(t, fill):
    """Fill the tile's weights, those after dropout, and the gradient of its scores."""
    attention_tiled.put_scores(t, t.weights, t.slopes)
    np.matmul(t.d, t.vt, out=t.dscores)
    drop = (t.dropped, t.minus_dots) if fill else (None, None)
    if fill:
        fill(t.rows, t.keys, t.dropped)
    if has_memory(t.weights):
        library(t.weights.dtype).tile_backward(
            *_rows_of(t.weights), t.end, *t.seen, t.weights, t.dscores, *drop
        )


def exponentials(q, k, mask, masked, ones, exp, inverse, seen):
    """As `attention.exponentials`, which computes where a row needs a shift."""
    np.matmul(q, k.swapaxes(2, 3), out=exp)
    if has_memory(exp) and exp.size:
        end, queries = exp.shape[3] - masked + 1, exp.shape[2]
        if not library(exp.dtype).weigh_block(
            *_rows_of(exp), end, queries, *SAFE, *seen, exp, inverse
        ):
            attention.exponentials(q, k, mask, masked, ones, exp, inverse, seen)


def scores_backward(exp, inverse, dscore, masks, dot):
    """As `attention.scores_backward`."""
    if has_memory(exp):
        library(exp.dtype).block_backward(*_rows_of(exp), exp, inverse, dscore, masks)


TILED = SimpleNamespace(
    sum_values=sum_values,
    add_gradients=partial(attention_tiled.add_gradients, fill_tile=tile_backward),
)
WHOLE = SimpleNamespace(exponentials=exponentials, scores_backward=scores_backward)


def _rows_of(scores):
    """Return the number of rows, of columns, and of elements from one row to the next."""
    *many, columns = scores.shape
    return math.prod(many), columns, scores.strides[-2] // scores.itemsize


def _are_plain(first, *others):
    dtype = first.dtype
    for one in (first, *others):
        if one is not None and not (one.dtype == dtype and one.flags.c_contiguous):
            return False
    return dtype in NUMBERS
