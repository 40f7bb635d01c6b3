"""What a local benchmark runs on: a device's operations, a way to put arrays there, and a clock that waits for them."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpitrain.arena import Arena
from mpitrain.errors import ConfigError
from mpitrain.kernels.engines import kernels_for
from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.ops import cuda, ops_for

BUDGET = 0.25    # seconds for the timed runs of one row
FEWEST, MOST = 3, 200


class Target(NamedTuple):
    """One device.

    put, get   arrays to it and back
    wait       for all that was started on it
    kernels    None where operations are NumPy's
    """

    kind: str
    ops: Any
    arena: Any
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]
    wait: Callable[[], None]
    kernels: Kernels | None

    def seconds(self, run: Callable[[], Any]) -> float:
        """Median time of a run, after one that does not count."""
        run()
        self.wait()
        times: list[float] = []
        while len(times) < FEWEST or (sum(times) < BUDGET and len(times) < MOST):
            start = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


class _Fresh:
    """An arena that only allocates: for devices without an arena of their own."""

    def __init__(self, engine: Any):
        self.take = engine.empty


def target(kind: str, checked: bool = False) -> Target:
    """The device of a kind; ConfigError where it is missing. `checked` is for the simulator."""
    if checked and kind != "cuda-sim":
        raise ConfigError(f"Only the simulator can check kernels, but --device is {kind}.", "Use --device cuda-sim --checked.")
    if kind == "cpu":
        return Target(kind, ops_for(kind), Arena(), lambda x: x, lambda x: x, lambda: None, None)
    if kind == "cuda-sim":
        kernels = Kernels(Simulator(checked=True)) if checked else kernels_for(kind)
        return Target(kind, cuda.body(kernels), Arena(), lambda x: x, lambda x: x, lambda: None, kernels)
    kernels = kernels_for(kind)
    engine = kernels.engine
    return Target(kind, cuda.body(kernels), _Fresh(engine), engine.put, engine.get, engine.wait, kernels)
