"""What belongs to one device, and the function that makes it: where arrays live, what computes on them, and by which kernels."""

from __future__ import annotations  # so that help() prints signatures as they are written here

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.kernels.engines import KERNELS, simulated
from mpitrain.kernels.loader import Kernels
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import Backend
from mpitrain.machine.devices import backend_for
from mpitrain.machine.kinds import Kind
from mpitrain.ops import Ops, cuda, host
from mpitrain.ops.cuda.linear import Multiply
from mpitrain.ops.host.rounded import TYPES, rounded

HALVES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}

Mirror = Callable[[Any, Any, Arena], None]
"""(parameters, mirror, arena): the mirror becomes the parameters, rounded; it may be the parameters themselves."""


class Device(NamedTuple):
    """One device.

    backend   where its arrays live, and how they get there and back
    ops       what computes on them
    kernels   None where operations are NumPy's
    multiply  the products of its linear layers, one of ops.cuda.product; None where operations are NumPy's
    mirror    what rounds parameters into the copy that layers compute with in half precision; None in any other
    half      the dtype of that copy and of activations, in half precision; None where these are stored as parameters are
    """

    backend: Backend
    ops: Ops
    kernels: Kernels | None = None
    multiply: Multiply | None = None
    mirror: Mirror | None = None
    half: np.dtype | None = None

    @property
    def kind(self) -> Kind:
        """As in device.kind, but never auto."""
        return self.backend.kind

    def arena(self) -> Arena:
        """A fresh arena of its memory."""
        return self.backend.arena()


def device_for(
    kind: str, gemm: str = "tiled", tiles: str = "", checked: bool = False, compute: str = "float32"
) -> Device:
    """The device of a resolved device.kind. Kernels are one set a process, the rest is made anew.

    gemm, tiles  as in the configuration of the device; where operations are NumPy's neither is read
    checked      of the simulator: it looks for races, wrong addresses and uninitialised reads
    compute      as in precision.compute
    raises       ConfigError where this machine lacks what the kind needs, or the tiles' file is no table of tiles
    """
    if checked and kind != "cuda-sim":
        raise ConfigError(
            f"Only the simulator can check kernels, but --device is {kind}.",
            "Use --device cuda-sim --checked.",
        )
    backend = backend_for(kind)
    if backend.kind not in KERNELS:
        if compute not in TYPES:
            return Device(backend, cast(Ops, host))
        ops, mirror = rounded(host, compute)
        return Device(backend, ops, mirror=mirror)
    multiply = cuda.multiply(gemm, tiles)
    kernels = simulated(checked=True) if checked else KERNELS[backend.kind]()
    device = Device(backend, cast(Ops, cuda.body(kernels, multiply, backend)), kernels, multiply)
    return (
        device._replace(mirror=partial(cuda.mirror, kernels), half=HALVES[compute])
        if compute in HALVES
        else device
    )


def ops_for(kind: str, gemm: str = "tiled", tiles: str = "", compute: str = "float32") -> Ops:
    """The operations that layers compute with on a kind of device.

    Parameters
    ----------
    kind : str
        "cpu", "cuda", "cuda-sim" or "auto".
    gemm, tiles, compute : str
        As device.gemm, device.tiles and precision.compute in the configuration of the run.

    Raises
    ------
    ConfigError
        If this machine lacks what the kind needs, or the file of tiles is none.
    """
    return device_for(kind, gemm, tiles, compute=compute).ops
