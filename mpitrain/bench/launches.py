"""What the host does to launch a kernel, on an engine that does nothing: microseconds and calls, of a launch seen for the first
time, which is looked at argument by argument, and of one that is found again.
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.ops.cuda import norm, product, steps

TURNS, RUNS = 15, 300
SIZE = 64
"""Elements of a row: nothing is computed with them."""


class Row(NamedTuple):
    """One operation.

    looked_at_us  of a launch whose arguments are each looked at, as the first of its kind is
    found_us      of a launch that is found again
    calls         of Python functions, when it is found again
    """

    name: str
    looked_at_us: float
    found_us: float
    calls: int


class Nothing:
    """An engine that does nothing.

    takes_plain  as a GPU's does; else it has each argument of each launch looked at, as the simulator does
    """

    name, capability, multiprocessors = "no engine", 90, 132

    def __init__(self, takes_plain: bool):
        self.takes_plain = takes_plain

    def load(self, source: Any, signature: Any, defines: dict[str, str]) -> Any:
        return _nothing

    def multiply(self, *arguments: Any) -> None:
        pass


def _nothing(grid: Any, block: Any, arguments: Any, shared: int) -> None:
    pass


class Ready:
    """Hands out buffers that it has: leasing is another matter, and none of the launch."""

    def __init__(self) -> None:
        self._has: dict[tuple, np.ndarray] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """As of an arena."""
        found = self._has.get((shape, dtype))
        return found if found is not None else self._has.setdefault((shape, dtype), np.empty(shape, dtype))


def operations(kernels: Kernels) -> dict[str, Callable[[], Any]]:
    """Some of a training step's, by name."""
    arena = Ready()
    a, b, c = (np.zeros((SIZE, SIZE), np.float32) for _ in range(3))
    row, p, g, m, v = (np.zeros(SIZE, np.float32) for _ in range(5))
    scalars: dict[str, Any] = {"scale": 1.0, "lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    return {
        "gemm": partial(product.gemm, kernels, arena, a, b, c, transposed_b=True, bias=row),
        "layer_norm": partial(norm.layer_norm, kernels, a, row, row, arena),
        "adamw": partial(steps.adamw, kernels, p, g, m, v, arena=arena, **scalars),
    }


def measure() -> Iterator[Row]:
    """Rows as they are measured: the least of some turns, since the host does other things, too."""
    found = operations(Kernels(Nothing(takes_plain=True)))
    for name, looked_at in operations(Kernels(Nothing(takes_plain=False))).items():
        yield Row(name, 1e6 * _seconds(looked_at), 1e6 * _seconds(found[name]), calls(found[name]))


def calls(run: Callable[[], Any]) -> int:
    """Calls of Python functions in a run, after one that makes ready."""
    run()
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def _seconds(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        for _ in range(RUNS):
            run()
        times.append((time.perf_counter() - start) / RUNS)
    return min(times)
