"""The clock of a local benchmark: it waits for what a device was given to do."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from mpitrain.ops.device import Device

BUDGET = 0.25  # seconds for the timed runs of one row
MOMENT = 0.002  # seconds that a turn lasts
FEWEST, MOST = 5, 200


def seconds(device: Device, *runs: Callable[[], Any]) -> list[float]:
    """Median time of each of some things to run, which take turns, after one turn each that does not count.

    In a turn as much is started as takes MOMENT, and then waited for: on a GPU a launch hides behind what runs. The
    simulator has one turn only, since its times say nothing about a GPU.
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
