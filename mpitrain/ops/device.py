"""A device: the backend that stores arrays, the operations on them, and their kernels."""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.kernels.engines import KERNELS, simulated
from mpitrain.kernels.loader import Kernels
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import Backend
from mpitrain.machine.devices import backend_for
from mpitrain.machine.kinds import Kind
from mpitrain.ops import Ops, bodies, cuda
from mpitrain.ops.cuda import wire
from mpitrain.ops.cuda.linear import Multiply
from mpitrain.ops.host.rounded import TYPES, rounded

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
    """

    backend: Backend
    ops: Ops
    kernels: Kernels | None = None
    multiply: Multiply | None = None
    mirror: Mirror | None = None
    half: np.dtype | None = None

    @property
    def kind(self) -> Kind:
        """The kind, as in device.kind, but never auto."""
        return self.backend.kind

    def itemsize(self, stored: str) -> int:
        """Return the bytes of a number with which layers compute; `stored` is that of parameters."""
        return (self.half or np.dtype(stored)).itemsize

    def arena(self) -> Arena:
        """Return a new arena of the device's memory."""
        return self.backend.arena()


def device_for(
    kind: str,
    gemm: str = "tiled",
    tiles: str = "",
    checked: bool = False,
    compute: str = "float32",
    attention: str = "auto",
    passes: str = "numpy",
) -> Device:
    """Return the device of a resolved device.kind.

    The kernels are one set for each GPU in a process; everything else is made anew.
    gemm, tiles  as in the configuration of the device; ignored where NumPy computes
    checked      simulator only: look for races, wrong addresses and uninitialised reads
    compute      as in precision.compute
    attention    as in memory.attention; ignored where kernels compute
    passes       as in device.passes; ignored where kernels compute
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
            return Device(backend, bodies.host(attention, passes))
        ops, mirror = rounded(compute, attention, passes)
        return Device(backend, ops, mirror=mirror)
    multiply = cuda.multiply(gemm, tiles)
    kernels = simulated(checked=True) if checked else KERNELS[backend.kind]()
    device = Device(backend, bodies.cuda(kernels, multiply, backend), kernels, multiply)
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
