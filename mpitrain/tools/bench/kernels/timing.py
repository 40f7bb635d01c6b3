"""The timing of a local benchmark, which waits until the device has completed its work."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from mpitrain.ops.device import Device

BUDGET = 0.25
"""Seconds for the timed runs of one row."""
MOMENT = 0.002
"""Seconds of one turn."""
FEWEST, MOST = 5, 200
"""Lower and upper bound of the number of turns."""


def seconds(device: Device, *runs: Callable[[], Any]) -> list[float]:
    """Return the median seconds of each function; the functions run in turns, after a warm-up.

    A turn starts as many runs as take MOMENT, and then waits for them. So on a GPU, launches
    overlap with kernels. The simulator has one turn only, since its times do not predict a GPU.
    """
    for run in runs:
        run()
    device.backend.synchronize()
    each = [max(1, int(MOMENT / _turn(device, run, 1))) for run in runs]
    times: list[list[float]] = []
    fewest, most = (1, 1) if device.kind == "cuda-sim" else (FEWEST, MOST)
    while len(times) < fewest or (sum(map(sum, times)) < BUDGET and len(times) < most):
        times.append([_turn(device, run, count) for run, count in zip(runs, each, strict=True)])
    return [
        statistics.median(column) / count
        for column, count in zip(zip(*times, strict=True), each, strict=True)
    ]


def _turn(device: Device, run: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    device.backend.synchronize()
    return time.perf_counter() - start
