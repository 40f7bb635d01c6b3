"""Half precision on the host: float32 arrays that hold only numbers of a 16-bit type.

Every output is rounded to the type, including the gradient of an input. Some values stay float32,
as in kernels that sum in float32:

saved      values of an operation for its own backward
losses     and the facts of a split vocabulary
gradients  of parameters
sums       of sharded layers over ranks, until the next operation

This shows the effect of half precision on training. It saves no memory.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.machine.arena import Arena
from mpitrain.ops import OPERATIONS, Operation, Ops
from mpitrain.ops.bodies import host
from mpitrain.ops.host.blocks import row_blocks
from mpitrain.ops.operands import operands

Round = Callable[[np.ndarray, Arena], None]
"""Round a float32 array in place."""


class Rounded(NamedTuple):
    """Operations in half precision.

    ops     as the host's; optimizer steps can also write the rounded parameters to a `mirror`
    mirror  (parameters, mirror, arena): the same without a step; the mirror may be the parameters
    """

    ops: Ops
    mirror: Callable[[Any, Any, Arena], None]


def rounded(dtype: str, attention: str = "auto", passes: str = "numpy") -> Rounded:
    """Return the operations on float32 NumPy arrays, rounded to a 16-bit type.

    dtype      "bfloat16" or "float16"
    attention  as memory.attention
    passes     as device.passes
    raises     ConfigError for a row that rounds something else than an operand
    """
    put, wide = TYPES[dtype], host(attention, passes)

    def mirror(parameters: np.ndarray, target: np.ndarray, arena: Arena) -> None:
        for block in row_blocks(parameters):
            target[block] = parameters[block]
            put(target[block], arena)

    def rounding(name: str, row: Operation) -> Callable:
        body, results = getattr(wide, name), operands(row.operands).results
        parameters = list(signature(body).parameters)
        if row.rounds not in (*parameters, *results, "nothing"):
            raise ConfigError(
                f"In half precision an operation rounds one of its operands or nothing, but `{name}` "
                f"rounds {row.rounds!r}.",
                f"Its row in OPERATIONS may name {', '.join((*parameters, *results))} or nothing.",
            )

        # Overflow raises no warning: the loss scale detects it.
        @np.errstate(over="ignore", invalid="ignore")
        @wraps(body)
        def run(*arguments: Any, **named: Any) -> Any:
            result = body(*arguments, **named)
            values = result if len(results) > 1 else [result] if results else []
            by_name = dict(zip(parameters, arguments, strict=False)) | named
            array = (by_name | dict(zip(results, values, strict=True))).get(row.rounds)
            if array is not None:
                for block in row_blocks(array):
                    put(array[block], by_name["arena"])
            return result

        return run

    ops = SimpleNamespace(**{name: rounding(name, row) for name, row in OPERATIONS.items()})
    return Rounded(cast(Ops, ops), mirror)


def to_bfloat16(x: np.ndarray, arena: Arena) -> None:
    """Round to nearest, ties to even, in place.    x: float32, contiguous"""
    short = arena.take(x.shape, ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):  # NaN is permitted
        short[...] = x
    x[...] = short


def to_float16(x: np.ndarray, arena: Arena) -> None:
    """Round as a cast to float16 and back, in place; but -0 may become 0.

    NumPy's cast works element by element, and takes seven times as long. A float16 of exponent e,
    at least -14, has an ulp of 2^(e - 10). The float32 number 1.5 x 2^(e + 13) has the same ulp.
    Adding it and subtracting it again rounds x. From 65520 on, the result is infinity.
    x: float32, contiguous
    """
    grid = arena.take(x.shape, np.float32)
    bits = grid.view(np.int32)
    np.bitwise_and(x.view(np.int32), 0x7F800000, out=bits)
    # The lower bound is float16's least exponent, -14. The upper bound keeps the grid finite:
    # larger numbers become infinite below.
    np.clip(bits, 113 << 23, 200 << 23, out=bits)
    bits += (13 << 23) | 0x400000
    with np.errstate(invalid="ignore"):
        x += grid
        x -= grid
        if not (x.max(initial=0) < 65536 and x.min(initial=0) > -65536):
            x[x >= 65536] = np.inf
            x[x <= -65536] = -np.inf


TYPES: dict[str, Round] = {"bfloat16": to_bfloat16, "float16": to_float16}
