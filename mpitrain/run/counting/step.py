"""One training step of one rank without arithmetic: its activation memory and its FLOPs.

The real layers, arena, pipeline program and pools run on arrays without memory (ops/counted.py).
No parameter exists, and no message is sent. So any rank counts any other rank's step.
"""

from collections.abc import Sequence
from dataclasses import replace
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
from mpitrain.ops.weightless import Weightless, WeightlessMemory, WeightlessOnDevice
from mpitrain.parallel.grid import Axes, share
from mpitrain.parallel.tensor.layer_factory import layers_for, loss_for
from mpitrain.pipeline.chunks import Units, chunks
from mpitrain.pipeline.instructions import Plan
from mpitrain.pipeline.memory import peak
from mpitrain.pipeline.partition import TIME
from mpitrain.pipeline.pipeline import Pipeline, own
from mpitrain.pipeline.schedules import plan_of
from mpitrain.pipeline.simulate import Cost
from mpitrain.run.counting.unsent import Unsent
from mpitrain.trace.recorder import Silent
from mpitrain.trace.ring_buffer import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT

SERIAL = "1f1b"
"""A schedule whose single stage ends each micro-batch before it begins the next."""


class Scheduled(NamedTuple):
    """A resolved configuration with its pipeline plan: the fields of `run.resolve.Resolved` that
    counting needs.
    """

    config: Config
    axes: Axes
    plan: Plan
    device: Device


class Step(NamedTuple):
    """The counts of one rank's training step.

    peak        bytes of activations, as `Pipeline.peak_bytes`
    flops       floating-point operations of matrix products
    recomputed  of `flops`, those that repeat a forward
    problem     the reason why the step could not be counted; empty: it was
    """

    peak: int = 0
    flops: int = 0
    recomputed: int = 0
    problem: str = ""


class Body:
    """A rank's layers that count: their operations, arena and memory.

    count   FLOPs and bytes so far
    arena   the accounts of activations
    layers  the layer factory of the rank
    """

    def __init__(self, device: Device, config: Config, rank: int, ranks: int):
        """Make the layers of one rank of a tensor-parallel group."""
        self.device, self.count = device, Count()
        self.memory = WeightlessMemory(WeightlessOnDevice if device.kernels else Weightless)
        self.arena = Arena(self.memory)
        group = CountedGroup(self.endpoint(rank, ranks), arena=self.arena)
        ops = counted(_leasing(device), self.count)
        self.layers = layers_for(ops, group, config.layout)
        self.layers.memory = config.memory

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


class Counter:
    """Counts training steps of ranks of one configuration that have one tensor-parallel rank.

    A mode in which one rank takes the loss of all rows is counted as if each took its own.

    units  the model, as a function of a layer factory
    tp     tensor-parallel rank
    """

    def __init__(self, job: Scheduled, source: Source | Unopened, units: Units, tp: int = 0):
        config, axes, plan, device = job
        self._job, self._source = job, source
        self._body = Body(device, config, tp, axes.tp)
        self._chunks = chunks(
            units, self._body.layers, plan.place, _partition(config), config.model.freeze
        )

    def step(self, pp: int, dp: int = 0) -> Step:
        """Count one training step of a pipeline stage, in the dp-th replica."""
        config, axes, plan, device = self._job
        body, parts = self._body, self._chunks.parts
        mine = [unit for part in own(plan.place, pp) for unit in parts[part]]
        storage = Storage(mine, config.precision.stored, axes.dp)
        replica: Any = Replica(storage, body, loss_for(body.layers), self._chunks.first(mine))
        endpoint, computed = body.endpoint(pp, axes.pp), device.half or storage.dtype
        rows = share(config.batch.size, dp, axes.dp)
        every = [share(len(rows), n, plan.micro_batches) for n in range(plan.micro_batches)]
        shares = _unlike(every) if _is_serial(plan) else every
        plan = plan if len(shares) == len(every) else plan_of(SERIAL, 1, len(shares))
        pipe = Pipeline(plan, parts, endpoint, replica, body.arena, computed, body.layers.now)
        inputs, targets = zeros(self._source, max(map(len, shares)), config.precision.stored)

        def loss(micro: int, logits: Any) -> Any:
            right = body.placed(targets[: len(shares[micro])]).reshape(-1)
            _, gradient = replica.loss(logits.reshape(len(right), -1), right, 1.0)
            return gradient.reshape(logits.shape)

        before = replace(body.count)
        pipe.train(
            [(0, rows.start + one.start, len(one), True) for one in shares],
            [(len(one), *inputs.shape[1:]) for one in shares],
            lambda micro: body.placed(inputs[: len(shares[micro])]),
            loss,
        )
        # FLOPs are proportional to rows.
        counted, flops = sum(map(len, shares)), body.count.flops - before.flops
        recomputed = body.count.recomputed - before.recomputed
        return Step(
            pipe.peak_bytes, flops * len(rows) // counted, recomputed * len(rows) // counted
        )


def _is_serial(plan: Plan) -> bool:
    """Return whether one stage ends each micro-batch before it begins the next."""
    return len(plan.lists) == 1 == peak(plan.lists[0], [Cost(0, 0, 0)] * len(plan.place)).live


def _unlike(shares: Sequence[range]) -> list[range]:
    """Return micro-batches with the peak of all of them, if each ends before the next begins.

    The first one writes gradients, and the others add. Among these, sizes matter.
    """
    rest = {len(one): one for one in shares[1:]}
    return [*shares[:1], *rest.values()]


def _partition(config: Config) -> str:
    """Return pipeline.partition; before the times are measured, the balanced one."""
    return "" if config.pipeline.partition == TIME else config.pipeline.partition


def _leasing(device: Device) -> Ops:
    """Return the device's operations, of which no kernel is launched."""
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
