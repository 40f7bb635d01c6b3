"""What a local benchmark runs on: a device's operations, a way to put arrays there, and a clock that waits for them."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpitrain.bench.header import processor
from mpitrain.errors import ConfigError
from mpitrain.kernels.engines import kernels_for
from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.machine.arena import Arena
from mpitrain.ops import Ops, cuda, ops_for

BUDGET = 0.25     # seconds for the timed runs of one row
MOMENT = 0.002    # seconds that a turn lasts
FEWEST, MOST = 5, 200


class Target(NamedTuple):
    """One device.

    put, get   arrays to it and back
    wait       for all that was started on it
    kernels    None where operations are NumPy's
    multiply   one of ops.cuda.product; None where operations are NumPy's
    """

    kind: str
    ops: Ops
    arena: Any
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]
    wait: Callable[[], None]
    kernels: Kernels | None = None
    multiply: Callable[..., None] | None = None

    @property
    def name(self) -> str:
        """What it is, for a header."""
        return self.kernels.engine.name if self.kernels else processor()

    def seconds(self, *runs: Callable[[], Any]) -> list[float]:
        """Median time of each of some things to run, which take turns, after one turn each that does not count.

        In a turn as much is started as takes MOMENT, and then waited for: on a GPU a launch hides behind what runs. The
        simulator has one turn only, since its times say nothing about a GPU.
        """
        for run in runs:
            run()
        self.wait()
        each = [max(1, int(MOMENT / self._turn(run, 1))) for run in runs]
        times: list[list[float]] = []
        fewest, most = (1, 1) if self.kind == "cuda-sim" else (FEWEST, MOST)
        while len(times) < fewest or (sum(map(sum, times)) < BUDGET and len(times) < most):
            times.append([self._turn(run, count) for run, count in zip(runs, each, strict=True)])
        return [statistics.median(column) / count for column, count in zip(zip(*times, strict=True), each, strict=True)]

    def _turn(self, run: Callable[[], Any], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            run()
        self.wait()
        return time.perf_counter() - start


class _Fresh:
    """An arena that only allocates: for devices without an arena of their own."""

    def __init__(self, engine: Any):
        self.take = engine.empty


def target(kind: str, checked: bool = False, gemm: str = "tiled", tiles: str = "") -> Target:
    """The device of a kind; ConfigError where it is missing.

    checked       for the simulator
    gemm, tiles   as in the configuration of the device
    """
    if checked and kind != "cuda-sim":
        raise ConfigError(f"Only the simulator can check kernels, but --device is {kind}.", "Use --device cuda-sim --checked.")
    if kind == "cpu" and (gemm != "tiled" or tiles):
        raise ConfigError("--gemm and --tiles are about products on a GPU, but --device is cpu.", "Leave them out.")
    if kind == "cpu":
        return Target(kind, ops_for(kind), Arena(), lambda x: x, lambda x: x, lambda: None)
    multiply = cuda.multiply(gemm, tiles)
    kernels = Kernels(Simulator(checked=True)) if checked else kernels_for(kind)
    ops = cuda.body(kernels, multiply)
    engine: Any = kernels.engine  # a GPU's has more to it than other engines: empty, put, get and wait
    if kind == "cuda-sim":
        return Target(kind, ops, Arena(), lambda x: x, lambda x: x, lambda: None, kernels, multiply)
    return Target(kind, ops, _Fresh(engine), engine.put, engine.get, engine.wait, kernels, multiply)
