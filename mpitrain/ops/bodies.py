"""The operations of each backend (reference, host, cuda), made from the rows of `OPERATIONS`.

A plugin adds its rows before. Also here: half precision on the host.
"""

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import Backend, HostBackend
from mpitrain.ops.host.attention import forwards
from mpitrain.ops.host.product import row_blocks
from mpitrain.ops.reference import ROWS
from mpitrain.ops.table import Operation, Ops, operands
from mpitrain.tables import Table

OPERATIONS: Table[str, Operation] = Table(ROWS)
"""Operations by name."""


def reference() -> Ops:
    return _each(lambda name, row: row.reference)


def host(attention: str = "auto", passes: str = "numpy") -> Ops:
    """Return the operations on NumPy arrays.

    attention  as memory.attention
    passes     as device.passes
    raises     ConfigError or KernelError if this machine cannot compile the passes
    """
    chosen: dict[str, Callable[..., Any]] = {}
    if passes == "compiled":
        from mpitrain.ops.host import compiled

        chosen |= compiled.bodies(attention)
    else:
        chosen |= forwards(attention)._asdict()
    return _each(
        lambda name, row: (
            chosen.get(name) or row.host or _of_file("host", name, row) or row.reference
        )
    )


def cuda(
    kernels: Any,
    multiply: Callable[..., None] | None = None,
    backend: Backend | None = None,
    tensor_cores: str = "mma",
) -> Ops:
    """Return the operations that launch these `Kernels`: bodies that take one `Launcher` first.

    multiply      the matrix product of linear layers; None: `gemm` of ops/cuda/product.py
    backend       the backend of the arrays; None: host memory
    tensor_cores  as device.tensor_cores, for attention; `multiply` knows its own
    """
    from mpitrain.ops.cuda.launches import Launcher
    from mpitrain.ops.cuda.product import gemm

    launcher = Launcher(kernels, multiply or gemm, backend or HostBackend(), tensor_cores)

    def bound(name: str, row: Operation) -> Callable[..., Any]:
        body = row.cuda or _of_file("cuda", name, row)
        if body is None:
            return partial(_refuse, name)
        run: Any = partial(body, launcher)
        if hasattr(body, "takes_runs"):
            run.weight_decays = launcher.numbers.runs
        return cast(Callable[..., Any], run)

    return _each(bound)


def _of_file(backend: str, name: str, row: Operation) -> Callable[..., Any] | None:
    """Return the body of an operation in the file of its backend, or None."""
    module = import_module(f"mpitrain.ops.{backend}.{row.file}") if row.file else None
    return getattr(module, name, None)


def _refuse(name: str, *arguments: Any, **named: Any) -> None:
    raise ConfigError(
        f"Devices compute with kernels, but the operation `{name}` has none.",
        "Use --device cpu, or give its row in OPERATIONS a body for cuda.",
    )


def _each(body: Callable[[str, Operation], Callable[..., Any]]) -> Ops:
    return cast(Ops, SimpleNamespace(**{name: body(name, row) for name, row in OPERATIONS.items()}))


Round = Callable[[np.ndarray, Arena], None]
"""Round a float32 array in place."""


class Rounded(NamedTuple):
    """Operations in half precision.

    ops     as the host's; an optimizer step can also write the rounded parameters to an array,
            its argument `mirror`
    mirror  (parameters, mirror, arena) -> None: write the rounded parameters to `mirror`, which may
            be the array of the parameters itself
    """

    ops: Ops
    mirror: Callable[[Any, Any, Arena], None]


def rounded(dtype: str, attention: str = "auto", passes: str = "numpy") -> Rounded:
    """Return the operations on float32 NumPy arrays that hold only numbers of a 16-bit type.

    Every output is rounded to the type, including the gradient of an input. Some values stay
    float32, as in kernels that sum in float32: what an operation saves for its own backward, losses,
    the maxima and sums of a vocabulary that is split over ranks, and gradients of parameters. The
    sum over ranks of a sharded layer stays float32 until the next operation. This shows the effect
    of half precision on training. It saves no memory.

    dtype      "bfloat16" or "float16"
    attention  as memory.attention
    passes     as device.passes
    raises     ConfigError if a row of `OPERATIONS` rounds something that is no operand
    """
    put, wide = TYPES[dtype], host(attention, passes)

    def mirror(parameters: np.ndarray, target: np.ndarray, arena: Arena) -> None:
        for block in row_blocks(parameters):
            target[block] = parameters[block]
            put(target[block], arena)

    def rounding(name: str, row: Operation) -> Callable:
        body, line = getattr(wide, name), operands(row.operands)
        results, parameters = line.results, [*(one.name for one in line.takes), "arena"]
        names = row.rounds.split()
        if not {*names} <= {*parameters, *results, "mirror", "nothing"}:
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
            by_name |= dict(zip(results, values, strict=True))
            for one in names:
                if (array := by_name.get(one)) is not None:
                    for block in row_blocks(array):
                        put(array[block], by_name["arena"])
            return result

        return run

    return Rounded(_each(rounding), mirror)


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
