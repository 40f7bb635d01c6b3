"""A device: the backend that stores arrays, the operations on them, and their kernels.

The operations of each backend (reference, host, cuda) are made from the rows of `OPERATIONS`; a
plugin adds its rows before. Also here: half precision on the host.
"""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Callable
from functools import cache, partial, wraps
from importlib import import_module
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import ml_dtypes
import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.machine.backend import Arena, Backend, HostBackend, SimulatorBackend
from mpitrain.machine.process import KINDS, Kind
from mpitrain.ops import OPERATIONS, Operation, Ops
from mpitrain.ops.host import attention as host_attention
from mpitrain.ops.host import layers
from mpitrain.ops.host.passes import by_numpy
from mpitrain.ops.host.product import row_blocks
from mpitrain.ops.table import operands

if TYPE_CHECKING:
    from mpitrain.kernels.loader import Kernels

HALVES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}

Mirror = Callable[[Any, Any, Arena], None]
"""(parameters, mirror, arena): write the parameters, rounded, to the mirror.

The mirror may be the parameters themselves.
"""


class Device(NamedTuple):
    """One device and its operations.

    backend   stores arrays on the device and copies them to and from the host
    ops       the operations on its arrays
    kernels   None where NumPy computes the operations
    multiply  the matrix product of its linear layers, one of ops.cuda.product; None where NumPy
              computes
    mirror    rounds parameters into the half-precision copy that layers compute with; None in other
              precisions
    half      the dtype of that copy and of activations; None where both have the dtype of the
              parameters
    tensor_cores  as device.tensor_cores
    compute   as precision.compute
    """

    backend: Backend
    ops: Ops
    kernels: Kernels | None = None
    multiply: Callable[..., None] | None = None
    mirror: Mirror | None = None
    half: np.dtype | None = None
    tensor_cores: str = "mma"
    compute: str = "float32"

    @property
    def kind(self) -> Kind:
        """The kind, as in device.kind, but never auto."""
        return self.backend.kind

    def itemsize(self, stored: str) -> int:
        """Return the bytes of a number with which layers compute; `stored` is that of parameters."""
        return (self.half or np.dtype(stored)).itemsize

    def arena(self) -> Arena:
        return self.backend.arena()


def _cuda_backend() -> Backend:
    from mpitrain.machine.cuda import CudaBackend

    return CudaBackend()


BACKENDS: dict[str, Callable[[], Backend]] = {
    "cpu": HostBackend,
    "cuda-sim": SimulatorBackend,
    "cuda": _cuda_backend,
}
"""The functions that make the backend of each kind."""


def backend_for(kind: str) -> Backend:
    """Return the backend of a resolved device.kind.

    raises  ConfigError for an unknown kind, or if this machine lacks the software or the GPU for it
    """
    if kind not in KINDS:
        raise ConfigError(
            f"There is no device of kind {kind!r} to compute on.",
            f"Name one of {', '.join(KINDS)}.",
        )
    return BACKENDS[kind]()


_ONE_MAKES = Lock()
"""Two sets on one GPU would share CuPy's modules, and lower each other's limits of shared memory."""


@cache
def _on_gpu(cupy: ModuleType, gpu: int) -> Kernels:
    """Return the kernels of the current GPU, whose number is `gpu`: modules belong to one GPU."""
    from mpitrain.kernels.cuda import CudaEngine
    from mpitrain.kernels.loader import Kernels

    return Kernels(CudaEngine(cupy))


def _on_current_gpu() -> Kernels:
    from mpitrain.machine.cuda import cupy_with_gpu

    cupy = cupy_with_gpu()
    with _ONE_MAKES:
        return _on_gpu(cupy, cupy.cuda.runtime.getDevice())


@cache
def simulated(checked: bool = False) -> Kernels:
    """Return the kernels in the simulator; `checked` looks for races, wrong addresses and
    uninitialised reads.
    """
    from mpitrain.kernels.loader import Kernels
    from mpitrain.kernels.simulator.machine import Simulator

    return Kernels(Simulator(checked=checked))


KERNELS: dict[Kind, Callable[[], Kernels]] = {"cuda": _on_current_gpu, "cuda-sim": simulated}
"""The functions that make the kernels of a kind that computes by kernels: one set for each GPU in a
process, made at first use. ConfigError if this machine lacks the hardware or software of the kind.
"""


def device_for(
    kind: str,
    gemm: str = "tiled",
    tiles: str = "",
    checked: bool = False,
    compute: str = "float32",
    attention: str = "auto",
    passes: str = "numpy",
    tensor_cores: str = "mma",
) -> Device:
    """Return the device of a resolved device.kind.

    The kernels are one set for each GPU in a process; everything else is made anew.
    gemm, tiles  as in the configuration of the device; ignored where NumPy computes
    checked      simulator only: look for races, wrong addresses and uninitialised reads
    compute      as in precision.compute
    attention    as in memory.attention; ignored where kernels compute
    passes       as in device.passes; ignored where kernels compute
    tensor_cores  as in device.tensor_cores; ignored where NumPy computes
    raises       ConfigError if this machine lacks the hardware or software of the kind, or the
                 tiles' file is no table of tiles
    """
    if checked and kind != "cuda-sim":
        raise ConfigError(
            f"Only the simulator can check kernels, but --device is {kind}.",
            "Use --device cuda-sim --checked.",
        )
    backend = backend_for(kind)
    if backend.kind not in KERNELS:
        if compute not in TYPES:
            return Device(backend, host_ops(attention, passes), compute=compute)
        ops, mirror = rounded(compute, attention, passes)
        return Device(backend, ops, mirror=mirror, compute=compute)
    return _with_kernels(backend, gemm, tiles, checked, compute, tensor_cores)


def _with_kernels(
    backend: Backend, gemm: str, tiles: str, checked: bool, compute: str, tensor_cores: str
) -> Device:
    """Return the device that computes on a backend's arrays by kernels, as `device_for`."""
    from mpitrain.ops.cuda import product, wire

    multiply = product.chosen(gemm, tiles, tensor_cores)
    kernels = simulated(checked=True) if checked else KERNELS[backend.kind]()
    if gemm == "3xtf32" and kernels.engine.capability < 80:
        raise ConfigError(
            f"device.gemm=3xtf32 needs tensor cores with TF32, but {kernels.engine.name} has none.",
            "Use --gemm tiled.",
        )
    if tensor_cores == "wgmma" and not kernels.engine.has_wgmma:
        raise ConfigError(
            f"device.tensor_cores=wgmma needs compute capability 9.0, which {kernels.engine.name} has not.",
            "Use device.tensor_cores=mma.",
        )
    ops = cuda_ops(kernels, multiply, backend, tensor_cores)
    device = Device(backend, ops, kernels, multiply, None, None, tensor_cores, compute)
    if compute not in HALVES:
        return device
    return device._replace(
        mirror=lambda parameters, mirror, arena: wire.convert(kernels, parameters, mirror),
        half=HALVES[compute],
    )


def ops_for(
    kind: str,
    gemm: str = "tiled",
    tiles: str = "",
    compute: str = "float32",
    attention: str = "auto",
    passes: str = "numpy",
) -> Ops:
    """Return the operations that layers compute with on a kind of device.

    Parameters
    ----------
    kind : str
        "cpu", "cuda", "cuda-sim" or "auto".
    gemm, tiles, compute, attention, passes : str
        As device.gemm, device.tiles, precision.compute, memory.attention and device.passes in the
        configuration of the run.

    Returns
    -------
    Ops
        The operations, for arrays in this device's memory.

    Raises
    ------
    ConfigError
        If this machine lacks the hardware or software of the kind or of the passes, or `tiles` is
        no file of tiles.
    """
    return device_for(kind, gemm, tiles, compute=compute, attention=attention, passes=passes).ops


def reference_ops() -> Ops:
    return _each(lambda name, row: row.reference)


def host_ops(attention: str = "auto", passes: str = "numpy") -> Ops:
    """Return the operations on NumPy arrays.

    attention  as memory.attention
    passes     as device.passes
    raises     ConfigError or KernelError if this machine cannot compile the passes
    """
    passes_of = by_numpy
    if passes == "compiled":
        from mpitrain.ops.host import compiled

        compiled.library(np.dtype("float32"))
        passes_of = compiled.by_library

    def bound(name: str, row: Operation) -> Callable[..., Any]:
        body = row.host or _of_file("host", name, row) or row.reference
        if body in layers.WITH_PASSES:
            return partial(body, passes_of)
        if body in host_attention.WITH_PASSES:
            return partial(body, passes_of, attention)
        return body

    return _each(bound)


def cuda_ops(
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
        body = cuda_body(name)
        if body is None:
            return partial(_refuse, name)
        run: Any = partial(body, launcher)
        if hasattr(body, "takes_runs"):
            run.weight_decays = launcher.numbers.runs
        return cast(Callable[..., Any], run)

    return _each(bound)


def cuda_body(name: str) -> Callable[..., Any] | None:
    """Return an operation on kernels, which takes a `Launcher` first; None: it has none."""
    row = OPERATIONS[name]
    return row.cuda or _of_file("cuda", name, row)


def _of_file(backend: str, name: str, row: Operation) -> Callable[..., Any] | None:
    """Return the body of an operation in the file of its backend, or None."""
    module = import_module(f"mpitrain.ops.{backend}.{row.file}") if row.file else None
    return getattr(module, name, None)


def no_kernel(name: str) -> tuple[str, str]:
    """Return law and way out where kernels must compute an operation that has no body for cuda."""
    return (
        f"Devices compute with kernels, but the operation `{name}` has none.",
        "Use --device cpu, or give its row in OPERATIONS a body for cuda.",
    )


def _refuse(name: str, *arguments: Any, **named: Any) -> None:
    raise ConfigError(*no_kernel(name))


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
    put, wide = TYPES[dtype], host_ops(attention, passes)

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
