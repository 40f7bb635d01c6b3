"""Memory transactions of every kernel of a training step, counted in the simulator.

A request is a load or store of a warp. Shared memory serves it in passes over its 32 banks, global
memory in sectors of 32 bytes. Nsight Compute counts the same on a GPU.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import LaunchTraffic, SharedAccess, Simulator
from mpitrain.machine.backend import Arena
from mpitrain.ops import OPERATIONS
from mpitrain.ops.device import cuda_ops
from mpitrain.ops.table import Operand
from mpitrain.optim import RULES
from mpitrain.optim.optimizer import ElementWise
from mpitrain.tools.bench.kernels.examples import examples
from mpitrain.tools.text_table import TextColumn, TextTable

SECTOR = 32

SIZES = {
    "M": 128,
    "K": 64,
    "N": 128,
    "C": 128,
    "V": 256,
    "L": 4096,
    "B": 1,
    "T": 128,
    "H": 2,
    "E": 2,
    "D": 64,
    "F": 8,
    "I": 4,
    "Y": 9,
    "X": 8,
    "S": 3,
    "P": 2,
    "W": 4,
}
"""Sizes of the example calls: whole tiles and whole vectors, with heads of 64 as in GPT-2."""

STEP = (
    "linear linear_gelu linear_backward_input gelu_linear_backward_input linear_backward_weight "
    "linear_backward_bias add add_bias gelu gelu_backward layer_norm layer_norm_backward_input "
    "layer_norm_backward_weight embedding embedding_backward_table embedding_backward_positions "
    "attention attention_backward cross_entropy cross_entropy_loss gradient_facts"
)
"""The operations of a GPT's training step whose arrays may have 16-bit elements."""


def updates() -> list[str]:
    """Return the operations of optimizers that step each element by itself, on float32."""
    steps = [rule.step for rule in RULES.values() if isinstance(rule.step, ElementWise)]
    return [step.op for step in steps if OPERATIONS[step.op].launches]


class TransactionRow(NamedTuple):
    """The memory transactions of one kernel launch.

    nbytes     bytes that the threads read and write in global memory
    sectors    bytes of the sectors that serve them; fewer than `nbytes` where threads read one word
    requests   requests of the warps to shared memory
    passes     passes over the banks that serve them
    least      passes if there were no bank conflict
    conflicts  instructions with bank conflicts, as file:line
    """

    dtype: str
    operation: str
    kernel: str
    nbytes: int
    sectors: int
    requests: int
    passes: int
    least: int
    conflicts: str


TABLE = TextTable(
    [
        TextColumn("dtype", "<9", "dtype"),
        TextColumn("operation", "<28", "operation"),
        TextColumn("kernel", "<30", "kernel"),
        TextColumn("bytes", "9", "nbytes"),
        TextColumn("sectors", "9", "sectors"),
        TextColumn("requests", "9", "requests"),
        TextColumn("passes", "8", "passes"),
        TextColumn("extra", "7", lambda row: row.passes - row.least),
        TextColumn("", "<", "conflicts"),
    ]
)
"""A line for each `TransactionRow`."""


def count(dtypes: Sequence[str]) -> Iterator[TransactionRow]:
    """Yield a row for each launch of each operation.

    dtypes  of the elements: "float32", "float16" or "bfloat16"
    """
    for dtype in dtypes:
        launches: list[LaunchTraffic] = []
        ops = cuda_ops(Kernels(Simulator(checked=True, traffic=launches)))
        arguments = examples(ops, SIZES, _Draw(dtype), Arena())
        for name in (*STEP.split(), *(updates() if dtype == "float32" else ())):
            operands = arguments(name)
            launches.clear()
            getattr(ops, name)(**operands)
            yield from (row_of(dtype, name, launch) for launch in launches)


def row_of(dtype: str, operation: str, launch: LaunchTraffic) -> TransactionRow:
    def total(field: str) -> int:
        return sum(getattr(access, field) for access in launch.shared)

    where = dict.fromkeys(access.where for access in launch.shared if has_conflicts(access))
    return TransactionRow(
        dtype,
        operation,
        launch.kernel,
        sum(launch.read.values()) + sum(launch.written.values()),
        SECTOR * sum(launch.sectors.values()),
        total("requests"),
        total("passes"),
        total("least"),
        " ".join(where),
    )


def has_conflicts(access: SharedAccess) -> bool:
    """Return whether a request to shared memory had a bank conflict."""
    return access.passes > access.least


class _Draw:
    def __init__(self, dtype: str):
        self._dtype, self._rng = dtype, np.random.default_rng(0)

    def __call__(self, operand: Operand, shape: tuple[int, ...]) -> np.ndarray:
        if operand.coded:
            return self._rng.integers(256, size=shape, dtype=np.uint8)
        if operand.below:
            return self._rng.integers(SIZES[operand.below], size=shape)
        numbers: Any = self._rng.standard_normal(shape, np.float32)
        return (np.abs(numbers) if operand.positive else numbers).astype(self._dtype)
