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

from mpitrain.machine.arena import Arena
from mpitrain.ops import Ops
from mpitrain.ops.host.blocks import row_blocks

Round = Callable[[np.ndarray, Arena], None]
"""Round a float32 array in place."""

FIRST = (
    "linear",
    "logits",
    "linear_gelu",
    "linear_relu",
    "linear_backward_input",
    "gelu_linear_backward_input",
    "linear_gelu_backward_input",
    "linear_relu_backward_input",
    "gelu",
    "relu",
    "layer_norm",
    "layer_norm_backward_input",
    "embedding",
    "attention",
)
SECOND = ("cross_entropy", "cross_entropy_split")
"""Operations that return a pair: FIRST rounds its first item, SECOND its second."""

WHOLE = ("attention_backward", "gelu_backward", "relu_backward")
"""Operations that return one result, which is rounded."""

STEPS = ("sgd", "momentum", "adamw")


class Rounded(NamedTuple):
    """Operations in half precision.

    ops     as the host's; `sgd`, `momentum` and `adamw` can also write the rounded parameters to a
            `mirror`
    mirror  (parameters, mirror, arena): the same without a step; the mirror may be the parameters
    """

    ops: Ops
    mirror: Callable[[Any, Any, Arena], None]


def rounded(body: Any, dtype: str) -> Rounded:
    """Return the operations of a backend of float32 NumPy arrays, rounded to a 16-bit type.

    dtype  "bfloat16" or "float16"
    """
    put = TYPES[dtype]

    def mirror(parameters: np.ndarray, target: np.ndarray, arena: Arena) -> None:
        for block in row_blocks(parameters):
            target[block] = parameters[block]
            put(target[block], arena)

    def picking(pick: Callable[[Any], np.ndarray]) -> Callable[[Callable], Callable]:
        """Return a decorator that rounds one item, chosen by `pick`, of an operation's result."""

        def rounding(operation: Callable) -> Callable:
            place = list(signature(operation).parameters).index("arena")

            @wraps(operation)
            def run(*arguments: Any, **named: Any) -> Any:
                result = operation(*arguments, **named)
                found, arena = pick(result), arguments[place]
                for block in row_blocks(found):
                    put(found[block], arena)
                return result

            return run

        return rounding

    def stepping(step: Callable) -> Callable:
        @wraps(step)
        def run(
            p: np.ndarray,
            g: np.ndarray,
            *state: np.ndarray,
            arena: Arena,
            mirror: np.ndarray | None = None,
            **numbers: Any,
        ) -> None:
            for block in row_blocks(p):
                copy = None if mirror is None else mirror[block]
                step(
                    p[block],
                    g[block],
                    *(buffer[block] for buffer in state),
                    arena=arena,
                    mirror=copy,
                    **numbers,
                )
                if copy is not None:
                    put(copy, arena)

        return run

    def add(a: np.ndarray, b: np.ndarray, out: np.ndarray, arena: Arena) -> None:
        for block in row_blocks(out):
            np.add(a[block], b[block], out=out[block])
            put(out[block], arena)

    def add_bias(
        x: np.ndarray,
        b: np.ndarray | None,
        out: np.ndarray,
        arena: Arena,
        residual: np.ndarray | None = None,
    ) -> None:
        for block in row_blocks(out):
            body.add_bias(
                x[block], b, out[block], arena, None if residual is None else residual[block]
            )
            put(out[block], arena)

    changed = {name: picking(lambda pair: pair[0])(getattr(body, name)) for name in FIRST}
    changed |= {name: picking(lambda pair: pair[1])(getattr(body, name)) for name in SECOND}
    changed |= {name: picking(lambda dx: dx)(getattr(body, name)) for name in WHOLE}
    changed |= {name: stepping(getattr(body, name)) for name in STEPS} | {
        "add": add,
        "add_bias": add_bias,
    }
    # Overflow raises no warning: the loss scale detects it.
    quietly = np.errstate(over="ignore", invalid="ignore")
    ops = SimpleNamespace(
        **{name: quietly(changed.get(name) or getattr(body, name)) for name in Ops.__annotations__}
    )
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
