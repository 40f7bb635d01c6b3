"""The kernels of each kind of device that computes by kernels: one set per process, made at first
use.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType

from mpitrain.kernels.cuda import CudaEngine
from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.machine.cuda import cupy_with_gpu
from mpitrain.machine.kinds import Kind


@cache
def _on_gpu(cupy: ModuleType) -> Kernels:
    return Kernels(CudaEngine(cupy))


@cache
def simulated(checked: bool = False) -> Kernels:
    """Return the kernels in the simulator; `checked` looks for races, wrong addresses and
    uninitialised reads.
    """
    return Kernels(Simulator(checked=checked))


KERNELS: dict[Kind, Callable[[], Kernels]] = {
    "cuda": lambda: _on_gpu(cupy_with_gpu()),
    "cuda-sim": simulated,
}
"""The functions that make the kernels; ConfigError if this machine lacks the hardware or software
of the kind.
"""
