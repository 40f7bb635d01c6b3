"""Models whose layers sleep: how long a pipeline takes is then known beforehand, and nothing else on the machine counts much."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.config import Config, parse, with_settings
from mpitrain.layers.base import Parameter, Unit, normal
from mpitrain.run.trainer import Trainer
from mpitrain.transport.base import Transport

Span = tuple[float, float]


class Sleeping:
    """A layer that sleeps for so many seconds in the forward and in each half of the backward, and notes from when to when.

    seconds  of the forward, the input half and the weight half: (fixed, for each row) of each
    width    of the output (rows, width); the input has any
    slept    where (start, end) of each sleep is noted
    """

    output_is_free = True

    def __init__(self, seconds: tuple[Span, Span, Span], width: int, slept: list[Span]):
        self._seconds, self._width, self._slept = seconds, width, slept

    def parameters(self) -> list[Parameter]:
        return [Parameter("gain", (1,), normal(1.0), True)]

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[0], self._width

    def _sleep(self, half: int, rows: int, written: Any) -> None:
        """Fill an array, and sleep for the rest of the time."""
        fixed, each = self._seconds[half]
        start = time.perf_counter()
        written[...] = 0
        time.sleep(max(0.0, start + fixed + each * rows - time.perf_counter()))
        self._slept.append((start, time.perf_counter()))

    def forward(self, w: Any, x: Any, now: Any, arena: Any) -> tuple[Any, Any]:
        y = arena.take((len(x), self._width), np.float32)
        self._sleep(0, len(x), y)
        return y, x

    def backward_input(self, w: Any, dy: Any, saved: Any, arena: Any) -> tuple[Any, Any]:
        dx = arena.take(saved.shape, np.float32)
        self._sleep(1, len(dy), dx)
        return dx, dy

    def backward_weight(self, pending: Any, dw: Any, arena: Any) -> None:
        dw["gain"].claim()
        self._sleep(2, len(pending), dw["gain"].array)


class NoLoss:
    """The end of a model that learns nothing."""

    def gradient(self, logits: Any, targets: Any, scale: float, arena: Any) -> tuple[float, Any]:
        return 0.0, logits

    def value(self, logits: Any, targets: Any, arena: Any) -> float:
        return 0.0

    correct = value


def configured(*settings: str) -> Config:
    """A configuration of anything but the model."""
    usual = [
        "model.kind=mlp",
        "data.source=digits",
        "optimizer.name=sgd",
        "optimizer.warmup=0",
        "device.kind=cpu",
    ]
    return parse(with_settings({}, [*usual, *settings]))


def sleeper(
    transport: Transport, config: Config, units: int, seconds: tuple[Span, Span, Span], width: int
) -> tuple[Trainer, list[Span]]:
    """A trainer of a model whose layers all sleep alike, and where they note when they slept. Collective.

    width  of what crosses boundaries: 4 x rows x width bytes
    """
    slept: list[Span] = []
    model = [
        Unit(f"sleeping.{i}", Sleeping(seconds, width if i < units - 1 else 2, slept))
        for i in range(units)
    ]
    return Trainer(transport, model, config, NoLoss()), slept


def started(main: Callable[..., bool], ranks: int, *words: str) -> int:
    """Run main(transport, *words) on so many ranks, started here as `mpitrain launch` does; 0 if it says True on all, else 1."""
    from mpitrain.cli.launch.command import command_line
    from mpitrain.cli.session import mpi_session as connected
    from mpitrain.machine import process

    if process.launched().size == 1:
        line, settings = command_line(ranks, [], [sys.executable, sys.argv[0], *words])
        one = dict.fromkeys(process.BLAS_VARIABLES, "1")
        return subprocess.run(
            line, env={**os.environ, **settings, **one}, stdin=subprocess.DEVNULL
        ).returncode
    with connected() as transport:
        is_right = main(transport, *words)
    return int(not is_right)
