"""A device: the backend that stores arrays, the operations on them, and their kernels."""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Callable
from functools import cache
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import Backend, HostBackend, SimulatorBackend
from mpitrain.machine.process import KINDS, Kind
from mpitrain.ops import Ops, bodies

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
        if compute not in bodies.TYPES:
            return Device(backend, bodies.host(attention, passes), compute=compute)
        ops, mirror = bodies.rounded(compute, attention, passes)
        return Device(backend, ops, mirror=mirror, compute=compute)
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
    ops = bodies.cuda(kernels, multiply, backend, tensor_cores)
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
