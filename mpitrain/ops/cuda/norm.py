"""LayerNorm. `saved` is (x, mean, inverse).

The input half of the backward reads all of x and dy. So it also makes the partial sums that the
weight half adds up.
"""

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.elements import KINDS, ByDtypes, Kind, element
from mpitrain.ops.cuda.grids import ROWS, SCRATCH, WIDE_ROWS, most_shared, row_blocks
from mpitrain.ops.cuda.sums import add_parts

PARTS = 4  # the most parts of the rows per multiprocessor, in a backward
FEWEST_ROWS = 8  # there are at most rows / FEWEST_ROWS parts, rounded up
MOST_RUNS = 512  # a backward has a row of at most so many runs in the registers of a block
REGISTERS = 4, 8
"""Sizes of the registers for a row in the forward, in runs for each thread.

A longer row is read from memory again.
"""


class ForwardKinds(dict):
    """A cache {(dtype, width of a row): `Kind` of the forward}."""

    def __init__(self) -> None:
        super().__init__()
        self._macros = {
            runs: ByDtypes(lambda x, runs=runs: element(x) | {"ROW_RUNS": runs})
            for runs in REGISTERS
        }

    def __missing__(self, key: tuple[np.dtype, int]) -> Kind:
        dtype, width = key
        kind = KINDS[dtype]
        runs = -(-width // (32 * kind.macros.run))
        for most, macros in self._macros.items():
            if runs <= most:
                kind = kind._replace(macros=macros[(dtype,)])
                break
        self[key] = kind
        return kind


FORWARD = ForwardKinds()


def layer_norm(kernels: Kernels, x, gain, bias, epsilon, arena):
    """Return (y, saved) with y = (x - mean) / sqrt(var + epsilon) * gain + bias over the last dim.

    x, y: (M, C); gain, bias: (C,)
    """
    rows, width = x.shape
    sums, macros = FORWARD[x.dtype, width]
    y, mean, inverse = (
        arena.take(x.shape, x.dtype),
        arena.take((rows,), sums),
        arena.take((rows,), sums),
    )
    kernels.launch(
        "layer_norm",
        row_blocks(rows),
        ROWS,
        (rows, width, epsilon, x, gain, bias, y, mean, inverse),
        macros=macros,
        fresh="y mean inverse",
    )
    return y, (x, mean, inverse)


def layer_norm_backward_input(kernels: Kernels, dy, gain, saved, arena, residual=None):
    """Return (dx, pending): dx with the residual added, and the state for the weight half.

    dy, dx   (M, C)
    pending  (2, parts, C): partial sums of dy times the normalised x, and of dy
    """
    rows, width = dy.shape
    dx = arena.take(dy.shape, dy.dtype)
    kind = KINDS[dy.dtype]
    wide = kind.macros.run
    runs = -(-width // wide)
    sums = arena.take(
        (2, max(1, min(-(-rows // FEWEST_ROWS), PARTS * kernels.engine.multiprocessors)), width),
        kind.sums,
    )
    threads = min(-(-runs // 32) * 32, WIDE_ROWS[0])
    if runs <= MOST_RUNS:
        kernels.launch(
            "layer_norm_backward",
            sums.shape[1:2],
            (threads,),
            (rows, width, dy, gain, *saved, residual, dx, sums[0], sums[1]),
            macros=kind.macros,
            fresh="dx gain_parts bias_parts",
        )
        return dx, sums
    shared = 4 * runs * wide * sums.itemsize
    keep = shared <= most_shared(kernels) - SCRATCH
    kernels.launch(
        "layer_norm_backward_wide",
        sums.shape[1:2],
        (threads,),
        (rows, width, int(keep), dy, gain, *saved, residual, dx, sums[0], sums[1]),
        shared * keep,
        macros=kind.macros,
        fresh="dx gain_parts bias_parts",
    )
    return dx, sums


def layer_norm_backward_weight(kernels: Kernels, pending, dgain, dbias, accumulate, arena):
    """Write or add both sums over rows, in one launch. A frozen gain or bias has None as gradient."""
    if dgain is None:
        add_parts(kernels, pending[1], dbias, accumulate)
    elif dbias is None:
        add_parts(kernels, pending[0], dgain, accumulate)
    else:
        add_parts(kernels, pending, dgain, accumulate, dbias)
