"""The kernels of a kind of device: one set a process, made when first asked for."""

from functools import cache

from mpitrain.errors import KernelError
from mpitrain.kernels.loader import Kernels

KINDS = ("cuda", "cuda-sim")


@cache
def kernels_for(kind: str) -> Kernels:
    """All kernels, on the current GPU ("cuda") or in the fast simulator ("cuda-sim")."""
    if kind == "cuda":
        import cupy

        from mpitrain.kernels.cuda import CudaEngine

        return Kernels(CudaEngine(cupy))
    if kind == "cuda-sim":
        from mpitrain.kernels.simulator.machine import Simulator

        return Kernels(Simulator())
    raise KernelError(f"There are no kernels for device kind {kind!r}.", f"There are some for {' and '.join(KINDS)}.")
