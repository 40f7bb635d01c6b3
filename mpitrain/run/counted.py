"""One training step of one rank without arithmetic: its activation memory and its FLOPs.

The real layers, arena, pipeline program and pools run on arrays without memory (ops/counted.py).
No parameter exists, and no message is sent. So any rank counts any other rank's step.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.group import Group
from mpitrain.config import Config
from mpitrain.data import Source, Unopened, zeros
from mpitrain.layers.base import Gradients, Loss, Weights
from mpitrain.layers.flat import Storage
from mpitrain.machine.arena import Arena
from mpitrain.machine.backend import DeviceBackend
from mpitrain.ops import Ops, bodies
from mpitrain.ops.counted import Count, Unlaunched, counted
from mpitrain.ops.device import Device
from mpitrain.ops.weightless import WeightlessMemory
from mpitrain.parallel.grid import share
from mpitrain.parallel.tensor.layer_factory import LayerFactory, layers_for
from mpitrain.pipeline.partition import TIME
from mpitrain.pipeline.pipeline import Pipeline, own
from mpitrain.run.chunks import Chunks, Units, chunks
from mpitrain.run.resolve import Resolved
from mpitrain.trace.recorder import Silent
from mpitrain.trace.ring_buffer import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT
from mpitrain.transport.unsent import Unsent


class Step(NamedTuple):
    """The counts of one rank's training step.

    peak        bytes of activations, as `Pipeline.peak_bytes`
    flops       floating-point operations of matrix products
    recomputed  of `flops`, those that repeat a forward
    nbytes      bytes that operations read and write, each array once
    """

    peak: int
    flops: int
    recomputed: int
    nbytes: int


class Body:
    """A rank's layers that count: their operations, arena and memory.

    count   FLOPs and bytes so far
    arena   the accounts of activations
    layers  the layer factory of the rank
    """

    def __init__(self, device: Device, config: Config, rank: int, ranks: int):
        """Make the layers of one rank of a tensor-parallel group."""
        self.device, self.memory, self.count = device, WeightlessMemory(), Count()
        self.arena = Arena(self.memory)
        group = CountedGroup(self.endpoint(rank, ranks), arena=self.arena)
        ops = counted(_leasing(device), self.count)
        self.layers = layers_for(ops, group, config.layout)

    def endpoint(self, rank: int, ranks: int) -> Unsent:
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


class Replica:
    """The parameters and gradients of a rank without memory, as the training step calls them."""

    def __init__(self, storage: Storage, body: Body, loss: Loss):
        computed = body.device.half or storage.dtype
        self._weights = storage.weights(body.memory.made((storage.length,), computed))
        flat = body.memory.made((storage.length,), storage.dtype)
        self._gradients, self._stored = storage.gradients(flat)
        self._loss, self._arena = loss, body.arena
        for unit in self._stored:
            for leaf in unit:
                leaf.filled = False

    def open(self, unit: int, part: int) -> Weights:
        return self._weights[unit]

    def close(self, unit: int, part: int) -> None:
        """Do nothing."""

    def gradients(self, unit: int, part: int) -> Gradients:
        return self._gradients[unit]

    def gradient_ready(self, unit: int, is_last: bool) -> None:
        """Do nothing."""

    def poll(self) -> None:
        """Do nothing."""

    def loss(self, logits: Any, targets: Any, scale: float) -> tuple[Any, Any]:
        return self._loss.gradient(logits, targets, scale, self._arena)


def count_step(resolved: Resolved, source: Source | Unopened, units: Units, rank: int) -> Step:
    """Count one training step of a rank.

    A mode in which one rank takes the loss of all rows is counted as if each took its own.

    units  the model, as a function of a layer factory
    """
    config, axes, plan, device = resolved.config, resolved.axes, resolved.plan, resolved.device
    if rank >= axes.ranks - axes.servers:
        return Step(0, 0, 0, 0)
    place = axes.place(rank)
    body = Body(device, config, place.tp, axes.tp)
    found = chunks(units, body.layers, plan.place, _partition(config))
    mine = [unit for part in own(plan.place, place.pp) for unit in found.parts[part]]
    storage = Storage(mine, config.precision.stored, axes.dp)
    replica: Any = Replica(storage, body, body.layers.loss())
    pipe = Pipeline(
        plan,
        found.parts,
        body.endpoint(place.pp, axes.pp),
        replica,
        body.arena,
        device.half or storage.dtype,
        body.layers.now,
    )
    rows = share(config.batch.size, place.dp, axes.dp)
    micro_batches = config.batch.micro_batches
    shares = [share(len(rows), micro, micro_batches) for micro in range(micro_batches)]
    inputs, targets = zeros(source, max(map(len, shares)), config.precision.stored)

    def loss(micro: int, logits: Any) -> Any:
        right = body.placed(targets[: len(shares[micro])]).reshape(-1)
        _, gradient = replica.loss(logits.reshape(len(right), -1), right, 1.0)
        return gradient.reshape(logits.shape)

    pipe.train(
        [(0, rows.start + one.start, len(one), True) for one in shares],
        [(len(one), *inputs.shape[1:]) for one in shares],
        lambda micro: body.placed(inputs[: len(shares[micro])]),
        loss,
    )
    count = body.count
    return Step(pipe.peak_bytes, count.flops, count.recomputed, count.nbytes)


def _partition(config: Config) -> str:
    """Return pipeline.partition; before the times are measured, the balanced one."""
    return "" if config.pipeline.partition == TIME else config.pipeline.partition


def _leasing(device: Device) -> Ops:
    """Return the device's operations, of which no kernel is launched."""
    if device.kernels is None:
        return device.ops
    unlaunched: Any = Unlaunched(device.kernels)
    return bodies.cuda(unlaunched, device.multiply, device.backend)


class _Phases(Silent):
    """A recorder that tells a `Count` whether a backward is running."""

    def __init__(self, count: Count):
        self._count = count

    def compute(self, name: int, phase: int = -1, unit: int = -1, micro: int = -1) -> int:
        self._count.is_backward = phase in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
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
