"""Sums in a fixed order: down columns, and of whole arrays."""

from typing import Any

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda.elements import KINDS
from mpitrain.ops.cuda.grids import POINTWISE, blocks, parts

# Threads of the kernels that sum down columns: 8 across, each with several columns, and 32 rows at
# a time.
COLUMNS = (
    8,
    32,
)


def add_parts(kernels: Kernels, sums: Any, out: Any, accumulate: bool, other: Any = None) -> None:
    """Write or add the sum of the rows of `sums` to out.

    sums   (P, N) in the dtype of sums; with `other`: (2, P, N)
    other  (N,), receives the sum of sums[1]; None: out is the only result
    """
    macros = KINDS[out.dtype].macros
    across = -(-out.size // (8 * macros.run))
    kernels.launch(
        "add_parts",
        (across,) if other is None else (across, 2),
        COLUMNS,
        (sums.shape[-2], out.size, sums, float(accumulate), out, other),
        macros=macros,
        fresh="" if accumulate else "y other",
    )


def sum_rows(kernels: Kernels, x: Any, out: Any, accumulate: bool, arena: Any) -> None:
    """Write or add the sum of x over its rows to out.    x: (M, N); out: (N,)"""
    rows, columns = x.shape
    kind = KINDS[x.dtype]
    across = -(-columns // (8 * kind.macros.run))
    sums = arena.take((parts(rows, across), columns), kind.sums)
    kernels.launch(
        "column_sums",
        (across, len(sums)),
        COLUMNS,
        (rows, columns, x, sums),
        macros=kind.macros,
        fresh="parts",
    )
    add_parts(kernels, sums, out, accumulate)


def total(kernels: Kernels, partial: Any, arena: Any) -> Any:
    """Return the sum of each row, (rows,) float64, of a float64 array (rows, count)."""
    rows, count = partial.shape
    result = arena.take((rows,), "float64")
    kernels.launch(
        "total",
        (1, rows),
        POINTWISE,
        (count, partial, result),
        macros=KINDS[partial.dtype].macros,
        fresh="result",
    )
    return result


def sum_all(kernels: Kernels, x: Any, arena: Any) -> Any:
    """Return the sum of a flat array, as a float64 array without dims."""
    partial = arena.take((1, max(blocks(x.size, KINDS[x.dtype].macros.run)[0], 1)), "float64")
    kernels.launch(
        "sum_parts",
        (partial.size,),
        POINTWISE,
        (x.size, x, partial),
        macros=KINDS[x.dtype].macros,
        fresh="parts",
    )
    return total(kernels, partial, arena).reshape(())
