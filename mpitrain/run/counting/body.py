"""A rank's layers, arena, parameters and groups without memory, which count instead of computing.

The real layers, arena and pools run on arrays without memory (ops/weightless.py).
"""

from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.group import Group
from mpitrain.config import Config
from mpitrain.layers.base import Gradients, Loss, Weights
from mpitrain.layers.flat import Storage
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import DeviceBackend
from mpitrain.ops import Ops, bodies
from mpitrain.ops.counted import Count, Unlaunched, counted
from mpitrain.ops.device import Device
from mpitrain.ops.weightless import (
    Weightless,
    WeightlessForKernels,
    WeightlessMemory,
    WeightlessOnDevice,
)
from mpitrain.parallel.tensor.layer_factory import layers_for
from mpitrain.run.counting.unsent import Unsent
from mpitrain.trace.recorder import Silent
from mpitrain.trace.ring_buffer import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT


class Body:
    """A rank's layers that count: their operations, arena and memory.

    count   FLOPs and bytes so far
    arena   the accounts of activations
    layers  the layer factory of the rank
    """

    def __init__(self, device: Device, config: Config, rank: int, ranks: int):
        """Make the layers of one rank of a tensor-parallel group."""
        self.device, self.count = device, Count()
        self.memory = WeightlessMemory(_kind_of(device))
        self.arena = Arena(self.memory)
        group = CountedGroup(self.endpoint(rank, ranks), arena=self.arena)
        ops = counted(_leasing(device), self.count)
        self.layers = layers_for(ops, group, config.layout)
        self.layers.memory = config.memory
        self.layers.itemsize = device.itemsize(config.precision.stored)

    def endpoint(self, rank: int, ranks: int) -> Any:
        """Return a transport without peers, which tells `count` about backwards."""
        return Unsent(
            rank,
            ranks,
            lambda count, dtype: self.memory.made((count,), dtype),
            _Phases(self.count),
        )

    def placed(self, rows: np.ndarray) -> Any:
        """Return rows of data on the device, as `Trainer.placed`."""
        half = self.device.half
        dtype = half if half and rows.dtype.kind == "f" else rows.dtype
        if isinstance(self.device.backend, DeviceBackend):
            return self.arena.take(rows.shape, dtype)
        return rows.astype(dtype, copy=False)


class CountedGroup(Group):
    """A tensor-parallel group of one existing rank; its collectives do nothing."""

    def _noted(self, operation: str, array: Any, bind: Any) -> Reduction:
        return _NOTHING


class _Context(NamedTuple):
    """The field of `ReplicationContext` that a pipeline reads: the first unit with a backward."""

    first: int


class Replica:
    """The parameters and gradients of a rank without memory, as the training step calls them."""

    def __init__(self, storage: Storage, body: Body, loss: Loss, first: int):
        self.replica = _Context(first)
        computed = body.device.half or storage.dtype
        self._weights = storage.weights(
            body.memory.made((storage.length,), computed),
            body.memory.made((storage.frozen.length,), computed),
        )
        flat = body.memory.made((storage.length,), storage.dtype)
        self._gradients, self._stored = storage.gradients(flat)
        self._loss, self._arena = loss, body.arena
        for unit in self._stored:
            for leaf in unit:
                leaf.filled = False

    def open(self, unit: int, micro: int) -> Weights:
        return self._weights[unit]

    def close(self, unit: int, micro: int) -> None:
        """Do nothing."""

    def gradients(self, unit: int, micro: int) -> Gradients:
        return self._gradients[unit]

    def gradient_ready(self, unit: int, is_last: bool) -> None:
        """Do nothing."""

    def poll(self) -> None:
        """Do nothing."""

    def loss(self, logits: Any, targets: Any, scale: float) -> tuple[Any, Any]:
        return self._loss.gradient(logits, targets, scale, self._arena)


def _kind_of(device: Device) -> type[Weightless]:
    if isinstance(device.backend, DeviceBackend):
        return WeightlessOnDevice
    return WeightlessForKernels if device.kernels else Weightless


def _leasing(device: Device) -> Ops:
    """Return the device's operations without launches of kernels."""
    if device.kernels is None or device.multiply is None:
        return device.ops
    unlaunched: Any = Unlaunched(device.kernels)
    return bodies.cuda(unlaunched, device.multiply, device.backend)


class _Phases(Silent):
    """A recorder that tells a `Count` whether a backward is running."""

    def __init__(self, count: Count):
        self._count = count

    def compute(self, *fields: int, **more: int) -> int:
        self._count.is_backward = fields[1] in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
        return 0

    def end(self, span: int) -> None:
        self._count.is_backward = False


class _Nothing:
    """A collective that does nothing."""

    algorithm, is_messages, state, learn, scratch_bytes = "", False, None, None, 0

    def run(self) -> None:
        """Return at once."""

    start = wait = run

    def poll(self) -> bool:
        return True


_NOTHING: Any = _Nothing()
