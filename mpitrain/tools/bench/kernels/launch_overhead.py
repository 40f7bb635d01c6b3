"""The time that the host spends on kernel launches, measured on an engine that launches nothing.

The first launch of a kind checks every argument ("looked at"). Later launches of this kind come
from a cache ("found again"). Both are measured in microseconds, and cached launches also in Python
calls.
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from mpitrain.kernels.loader import H100, Kernels
from mpitrain.ops import OPERATIONS, bodies
from mpitrain.ops.bodies import examples
from mpitrain.ops.cuda import wire
from mpitrain.ops.operands import Operand
from mpitrain.tools.text_table import TextColumn, TextTable

TURNS, RUNS = 15, 300
"""Timed turns, and runs in a turn; the fastest turn counts."""
SIZE = 64
"""Elements of a row; no kernel runs, so the number does not matter."""
SIZES = dict.fromkeys("MKNCVL", SIZE) | {"B": 2, "T": SIZE // 2, "H": 4, "E": 4, "D": SIZE // 4}
SIZES |= {"I": 8, "J": 8, "F": 16, "G": 16, "S": 3, "P": 2}
"""Sizes of the examples of `mpitrain.ops.table`."""


class OverheadRow(NamedTuple):
    """The host's time for the launches of one operation.

    looked_at_us  microseconds if all arguments are checked, as in a first launch
    found_us      microseconds with cached launches
    calls         Python function calls with cached launches
    launches      kernel launches of the operation
    """

    name: str
    looked_at_us: float
    found_us: float
    calls: int
    launches: int


TABLE = TextTable(
    [
        TextColumn("operation", "<28", "name"),
        TextColumn("looked at us", "13.2f", "looked_at_us"),
        TextColumn("found again us", "15.2f", "found_us"),
        TextColumn("ratio", "7.1f", lambda row: row.looked_at_us / row.found_us),
        TextColumn("calls", "6", "calls"),
        TextColumn("launches", "9", "launches"),
    ]
)
"""A line for each `OverheadRow`."""


class Nothing:
    """An engine whose launches do nothing.

    takes_plain  True: launches are cached, as on a GPU; False: every launch checks its arguments,
                 as in the simulator
    """

    name, capability, multiprocessors, multiprocessor = "no engine", 90, 132, H100

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
    """Return {name: function to measure}: operations of layers, and kernels of all-reduces."""
    arena, ops = RecycledArena(), bodies.cuda(kernels)
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
            if row.cuda
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


def measure() -> Iterator[OverheadRow]:
    """Yield rows as they are measured. Times are those of the fastest turn, since the host has
    other work.
    """
    kernels = Kernels(Nothing(takes_plain=True))
    cached = operations(kernels)
    for name, looked_at in operations(Kernels(Nothing(takes_plain=False))).items():
        yield OverheadRow(
            name,
            1e6 * _seconds(looked_at),
            1e6 * _seconds(cached[name]),
            *calls(kernels, cached[name]),
        )


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


def _seconds(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        for _ in range(RUNS):
            run()
        times.append((time.perf_counter() - start) / RUNS)
    return min(times)
