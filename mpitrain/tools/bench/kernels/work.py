"""The work of an operation on arrays of a device: how to run it, its true result, its amount."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.ops import OPERATIONS, Ops, bodies
from mpitrain.ops.bodies import examples
from mpitrain.ops.device import Device
from mpitrain.ops.operands import Operand, operands

WRONG = 1e-4
"""Largest error of a correct element, relative to the reference's largest element."""
SHAPES = {
    "cpu": (8, 128, 256, 4, 512),
    "cuda-sim": (2, 24, 32, 2, 40),
    "cuda": (16, 1024, 768, 12, 50304),
}
"""{kind of device: (sequences, tokens, channels, heads, vocabulary)}."""

MOVED = {"cpu": 1024, "cuda-sim": 48, "cuda": 1 << 16}
"""Rows for memory-bound operations. On a GPU they exceed all caches and hide launch costs."""


class OperationRow(NamedTuple):
    """One measurement.

    rate     10^9 bytes/s or, if `unit` is GFLOP/s, 10^9 floating-point operations/s
    percent  rate relative to the copy, or relative to the first matrix product
    peer_us  microseconds of the peer, timed in turns with mpitrain; nan without a peer
    """

    name: str
    time_us: float
    rate: float
    unit: str
    percent: float
    peer_us: float
    wrong: int


class OperationCall(NamedTuple):
    """An operation on given arrays.

    run        runs the operation
    result     () -> array to compare
    truth      () -> reference on the host
    amount     bytes moved or floating-point operations of a run
    tolerance  as in `count_wrong`
    peer       runs PyTorch's operation, or two of mpitrain's operations in place of a fused one
    """

    name: str
    run: Callable[[], Any]
    result: Callable[[], Any]
    truth: Callable[[], Any]
    amount: float
    unit: str = "GB/s"
    tolerance: float = WRONG
    peer: Callable[[], Any] | None = None


class PeerAttention(Protocol):
    """A protocol for the attention of a reference library, such as PyTorch, on given arrays."""

    def forward(self) -> None:
        """Compute the attention."""

    def backward(self) -> None:
        """Compute the gradient of the input, after `forward`."""


Peer = Callable[[str, np.ndarray, np.ndarray, int, str], PeerAttention]
"""(device kind, qkv, dy, heads, dtype) -> attention of the reference library, PyTorch."""


def count_wrong(result: np.ndarray, truth: np.ndarray, tolerance: float = WRONG) -> int:
    """Return the number of elements with an error above tolerance times the largest element.

    NaN counts as wrong.
    """
    return int(
        (~(np.abs(result - truth) <= tolerance * max(np.abs(truth).max(initial=0), 1e-3))).sum()
    )


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(dtype)


def values(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


class Calls:
    """Example calls of operations at given sizes: on a device, and by their definitions.

    device  the device whose operations are called
    sizes   as in `mpitrain.ops.table`
    """

    def __init__(self, device: Device, **sizes: int):
        def draw(operand: Operand, shape: tuple[int, ...]) -> np.ndarray:
            rng = np.random.default_rng([*operand.name.encode()])
            if operand.below:
                return rng.integers(sizes[operand.below], size=shape)
            if operand.coded:
                return rng.integers(256, size=shape, dtype=np.uint8)
            numbers = rng.standard_normal(shape, np.float32)
            return np.abs(numbers) if operand.positive else numbers

        self._sizes, self._ops, self._put = sizes, device.ops, device.backend.from_host
        self._on_device = examples(
            self._ops, sizes, lambda *drawn: self._put(draw(*drawn)), device.arena()
        )
        self._reference = bodies.reference()
        self._on_host = examples(self._reference, sizes, draw, None)

    def work(
        self,
        label: str,
        name: str,
        flops: float = 0.0,
        peer: Callable[[dict[str, Any]], Any] | None = None,
        **changed: Any,
    ) -> OperationCall:
        """Return the work of an operation. Of its results, the first one is compared.

        flops    floating-point operations; 0: the amount is the bytes that it moves
        peer     (arguments by name): run the peer
        changed  numbers and host arrays that replace arguments of the example, or add to them
        """
        row, latest = OPERATIONS[name], list[Any]()
        line = operands(row.operands)
        arguments = self._on_device(name) | {
            key: self._put(value) if hasattr(value, "nbytes") else value
            for key, value in changed.items()
        }

        def call(ops: Ops, arguments: dict[str, Any]) -> Any:
            result, output = getattr(ops, name)(**arguments), line.gives[0].name
            first = result[0] if len(line.results) > 1 else result
            return arguments.get(output, first)

        def run() -> None:
            latest[:] = [call(self._ops, arguments)]

        return OperationCall(
            label,
            run,
            lambda: latest[0],
            lambda: call(self._reference, self._on_host(name) | changed),
            flops
            or row.nbytes(**self._sizes)
            + sum(getattr(value, "nbytes", 0) for value in changed.values()),
            "GFLOP/s" if row.products else "GB/s",
            peer=partial(peer, arguments) if peer else None,
        )
