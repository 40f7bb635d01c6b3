"""The kernels of a kind of device: one set a process, made when first asked for."""

from functools import cache
from typing import Any

from mpitrain.errors import ConfigError, KernelError
from mpitrain.kernels.loader import Kernels

KINDS = ("cuda", "cuda-sim")


@cache
def kernels_for(kind: str) -> Kernels:
    """All kernels, on the current GPU ("cuda") or in the fast simulator ("cuda-sim")."""
    if kind == "cuda":
        return Kernels(_cuda_engine())
    if kind == "cuda-sim":
        from mpitrain.kernels.simulator.machine import Simulator

        return Kernels(Simulator())
    raise KernelError(f"There are no kernels for device kind {kind!r}.", f"There are some for {' and '.join(KINDS)}.")


def _cuda_engine() -> Any:
    """The engine of the current GPU; ConfigError without CuPy, a driver or a GPU."""
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(f"Kernels on a GPU need CuPy, but it cannot be imported: {error}.",
                          "Install it for your driver: pip install 'mpitrain[cuda13]', or [cuda12].") from None
    from mpitrain.kernels.cuda import CudaEngine

    try:
        return CudaEngine(cupy)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(f"Kernels need a GPU and its driver, but CuPy {cupy.__version__} says {error}.",
                          "Install NVIDIA's driver (`nvidia-smi` must list a GPU).") from None
