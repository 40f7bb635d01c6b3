"""Every operation on kernels of an engine that launches nothing, and the Python calls that its launches take."""

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np

from mpitrain.kernels.loader import H100, Kernels
from mpitrain.ops import OPERATIONS
from mpitrain.ops.cuda import wire
from mpitrain.ops.device import cuda_ops
from mpitrain.ops.table import Operand
from mpitrain.tools.bench.kernels.examples import examples

SIZE = 64
"""Elements of a row; no kernel runs, so the number does not matter."""
SIZES = dict.fromkeys("MKNCVL", SIZE) | {"B": 2, "T": SIZE // 2, "H": 4, "E": 4, "D": SIZE // 4}
SIZES |= {"I": 8, "J": 8, "F": 16, "G": 16, "S": 3, "P": 2}
"""Sizes of the examples of `mpitrain.ops.table`."""


class Nothing:
    """An engine whose launches do nothing.

    takes_plain  True: launches are cached, as on a GPU; False: every launch checks its arguments,
                 as in the simulator
    """

    name, capability, multiprocessors, multiprocessor = "no engine", 90, 132, H100
    has_wgmma = False

    def __init__(self, takes_plain: bool):
        self.takes_plain = takes_plain

    def load(self, source: Any, signature: Any, defines: dict[str, str]) -> Any:
        return _nothing

    def prepare(self, *arguments: Any) -> None:
        pass

    multiply = prepare


def _nothing(grid: Any, block: Any, arguments: Any, shared: int) -> None:
    pass


class RecycledArena:
    """An arena that returns the same buffers again, so that leasing takes no time."""

    def __init__(self) -> None:
        self._has: dict[tuple, np.ndarray] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        buffer = self._has.get((shape, dtype))
        return (
            buffer
            if buffer is not None
            else self._has.setdefault((shape, dtype), np.empty(shape, dtype))
        )


def operations(kernels: Kernels) -> dict[str, Callable[[], Any]]:
    """{name: its call}: operations of layers, and kernels of all-reduces."""
    arena, ops = RecycledArena(), cuda_ops(kernels)
    arguments = examples(ops, SIZES, drawn, arena)
    p, g, half = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float16)
    coded, scales = np.zeros(SIZE, np.int8), np.zeros(1, np.float32)
    return {
        **{
            name: partial(
                getattr(ops, name),
                *arguments(name).values(),
                **({"mirror": half} if row.rounds == "mirror" else {}),
            )
            for name, row in OPERATIONS.items()
            if row.launches
        },
        "add_into": partial(wire.add_into, kernels, p, half),
        "maximum_into": partial(wire.maximum_into, kernels, p, g),
        "convert": partial(wire.convert, kernels, p, half),
        "encode_int8": partial(wire.encode_int8, kernels, p, coded, scales),
        "decode_int8": partial(wire.decode_int8, kernels, coded, scales, p, True),
        "encode_fp16": partial(wire.encode_fp16, kernels, p, half, scales),
        "decode_fp16": partial(wire.decode_fp16, kernels, half, scales, p, True),
        "top_k": partial(wire.top_k, kernels, p, 3, arena),
    }


def drawn(operand: Operand, shape: tuple[int, ...]) -> np.ndarray:
    """Return zeros; their dtype is an integer one if the operand has tokens or targets."""
    kind = np.int64 if operand.below else np.uint8 if operand.coded else np.float32
    return np.zeros(shape, kind)


def calls(kernels: Kernels, run: Callable[[], Any]) -> tuple[int, int]:
    """Return the numbers of Python calls and of kernel launches in a run, after a warm-up run."""
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
