"""The host overhead of kernel launches, measured on an engine that does nothing.

A first launch of a kind checks every argument ("looked at"). Later launches come from a cache
("found again"). Both are measured in microseconds, and cached launches also in Python calls.
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.multiprocessor import H100
from mpitrain.ops import cuda
from mpitrain.ops.cuda import top_k, wire

TURNS, RUNS = 15, 300
"""Timed turns, and runs in a turn; the fastest turn counts."""
SIZE = 64
"""Elements of a row; no kernel computes with them."""


class Row(NamedTuple):
    """The launch overhead of one operation.

    looked_at_us  time with checks of all arguments, as in a first launch
    found_us      time with cached launches
    calls         calls of Python functions with cached launches
    launches      kernel launches
    """

    name: str
    looked_at_us: float
    found_us: float
    calls: int
    launches: int


class Nothing:
    """An engine that does nothing.

    takes_plain  True: launches are cached, as on a GPU; False: every launch checks its arguments,
                 as in the simulator
    """

    name, capability, multiprocessors, multiprocessor = "no engine", 90, 132, H100

    def __init__(self, takes_plain: bool):
        self.takes_plain = takes_plain

    def load(self, source: Any, signature: Any, defines: dict[str, str]) -> Any:
        return _nothing

    def multiply(self, *arguments: Any) -> None:
        pass


def _nothing(grid: Any, block: Any, arguments: Any, shared: int) -> None:
    pass


class Ready:
    """An arena that returns the same buffers again, so that leasing takes no time."""

    def __init__(self) -> None:
        self._has: dict[tuple, np.ndarray] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return the buffer of this shape and dtype, as Arena.take does."""
        found = self._has.get((shape, dtype))
        return (
            found
            if found is not None
            else self._has.setdefault((shape, dtype), np.empty(shape, dtype))
        )


def operations(kernels: Kernels) -> dict[str, Callable[[], Any]]:
    """Return all measured functions by name: operations of layers, and kernels of all-reduces."""
    arena, ops = Ready(), cuda.body(kernels)
    x, w, dy, y = (np.zeros((SIZE, SIZE), np.float32) for _ in range(4))
    gain, bias, p, g, m, v = (np.zeros(SIZE, np.float32) for _ in range(6))
    tokens, targets = np.zeros((2, SIZE // 2), np.int64), np.zeros(SIZE, np.int64)
    x3, qkv = x.reshape(2, -1, SIZE), np.zeros((2, SIZE // 2, 3 * SIZE), np.float32)
    half, coded, scales = (
        np.zeros(SIZE, np.float16),
        np.zeros(SIZE, np.int8),
        np.zeros(1, np.float32),
    )
    saved, normed, heeded = (
        (x, True),
        (x, gain, bias),
        (qkv, x3, np.zeros((2, 4, SIZE // 2), np.float32), 4),
    )
    _, pending = ops.linear_backward_input(dy, w, saved, arena)
    # The bias half finds the sums of this weight half.
    ops.linear_backward_weight(pending, y, False, arena)
    _, sums = ops.layer_norm_backward_input(dy, gain, normed, arena)
    facts = ops.row_exponentials(x, targets, 0, gain, arena)
    number = {"scale": 1.0, "lr": 0.1, "weight_decay": 0.0, "arena": arena, "mirror": half}
    found = {
        "linear": (x, w, bias),
        "logits": (x, w, bias),
        "linear_gelu": (x, w, bias),
        "linear_relu": (x, w, bias),
        "linear_backward_input": (dy, w, saved),
        "gelu_linear_backward_input": (dy, w, saved, y),
        "linear_gelu_backward_input": (dy, w, (saved, y)),
        "linear_relu_backward_input": (dy, w, (saved, y)),
        "linear_backward_weight": (pending, y, True),
        "linear_backward_bias": (pending, bias, True),
        "add": (x, dy, y),
        "weighted_sum": (x, 0.5, dy, 0.5, y),
        "add_bias": (y, bias, y),
        "gelu": (x,),
        "gelu_backward": (dy, x),
        "relu": (x,),
        "relu_backward": (dy, x),
        "layer_norm": (x, gain, bias),
        "layer_norm_backward_input": (dy, gain, normed),
        "layer_norm_backward_gain": (sums, gain, True),
        "layer_norm_backward_bias": (sums, bias, True),
        "embedding": (tokens, w, x),
        "embedding_backward_table": (x3, (tokens, 0), w, True),
        "embedding_backward_positions": (x3, y, True),
        "attention": (qkv, 4),
        "attention_backward": (x3, heeded),
        "cross_entropy": (x, targets, 1.0),
        "cross_entropy_loss": (x, targets),
        "count_correct": (x, targets),
        "row_maximum": (x,),
        "row_exponentials": (x, targets, 0, gain),
        "row_argmax": (x, 0, gain),
        "cross_entropy_split": (x, targets, 0, gain, facts, 1.0),
        "count_correct_split": (gain, targets),
        "gradient_facts": (g,),
    }
    listed: dict[str, Callable[[], Any]] = {
        name: partial(getattr(ops, name), *arguments, arena) for name, arguments in found.items()
    }
    return listed | {
        "sgd": partial(ops.sgd, p, g, **number),
        "momentum": partial(ops.momentum, p, g, m, beta=0.9, **number),
        "adamw": partial(ops.adamw, p, g, m, v, beta1=0.9, beta2=0.95, eps=1e-8, step=1, **number),
        "add_into": partial(wire.add_into, kernels, p, half),
        "maximum_into": partial(wire.maximum_into, kernels, p, g),
        "convert": partial(wire.convert, kernels, p, half),
        "encode_int8": partial(wire.encode_int8, kernels, p, coded, scales),
        "decode_int8": partial(wire.decode_int8, kernels, coded, scales, p, True),
        "encode_fp16": partial(wire.encode_fp16, kernels, p, half, scales),
        "decode_fp16": partial(wire.decode_fp16, kernels, half, scales, p, True),
        "top_k": partial(top_k.top_k, kernels, p, 3, arena),
    }


def measure() -> Iterator[Row]:
    """Yield rows as they are measured; the fastest turn counts, since the host has other work."""
    kernels = Kernels(Nothing(takes_plain=True))
    found = operations(kernels)
    for name, looked_at in operations(Kernels(Nothing(takes_plain=False))).items():
        yield Row(
            name,
            1e6 * _seconds(looked_at),
            1e6 * _seconds(found[name]),
            *calls(kernels, found[name]),
        )


def calls(kernels: Kernels, run: Callable[[], Any]) -> tuple[int, int]:
    """Return the Python calls and the kernel launches of a run, after a warm-up run."""
    run()
    count, before = 0, kernels.launches

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count, kernels.launches - before


def _seconds(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        for _ in range(RUNS):
            run()
        times.append((time.perf_counter() - start) / RUNS)
    return min(times)
