"""The kernels of each kind of device that computes by kernels: one set for each
GPU in a process, made at first use.
"""

from collections.abc import Callable
from functools import cache
from threading import Lock
from types import ModuleType

from mpitrain.kernels.cuda import CudaEngine
from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.machine.cuda import cupy_with_gpu
from mpitrain.machine.kinds import Kind

_ONE_MAKES = Lock()
"""Two sets on one GPU would share CuPy's modules, and lower each other's limits of shared memory."""


@cache
def _on_gpu(cupy: ModuleType, gpu: int) -> Kernels:
    """Return the kernels of the current GPU, whose number is `gpu`: modules belong to one GPU."""
    return Kernels(CudaEngine(cupy))


def _on_current_gpu() -> Kernels:
    cupy = cupy_with_gpu()
    with _ONE_MAKES:
        return _on_gpu(cupy, cupy.cuda.runtime.getDevice())


@cache
def simulated(checked: bool = False) -> Kernels:
    """Return the kernels in the simulator; `checked` looks for races, wrong addresses and
    uninitialised reads.
    """
    return Kernels(Simulator(checked=checked))


KERNELS: dict[Kind, Callable[[], Kernels]] = {
    "cuda": _on_current_gpu,
    "cuda-sim": simulated,
}
"""The functions that make the kernels; ConfigError if this machine lacks the hardware or software
of the kind.
"""
