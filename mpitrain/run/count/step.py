"""Counts a training step of one rank without arithmetic: its activation memory and its FLOPs.

The real layers, arena and pipeline run on arrays with shapes but without memory (weightless.py).
Their operations only add up FLOPs (operations.py). No parameter exists, and no message is sent, so a
rank can count the step of any other rank.
"""

import math
from collections import Counter as Numbers
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from mpitrain.collectives.engine.compose import LocalReduction
from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.group import Group
from mpitrain.collectives.routes import Routes
from mpitrain.config import Config
from mpitrain.data import zeros
from mpitrain.errors import ConfigError, MpitrainError, gigabytes
from mpitrain.layers.base import Gradients, Loss, Now, Weights
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import Arena, Backend, DeviceBackend
from mpitrain.models.table import MODELS
from mpitrain.ops import Ops
from mpitrain.ops.device import Device, cuda_ops
from mpitrain.parallel.tensor.layer_factory import layers_for, loss_for
from mpitrain.pipeline.pipeline import MicroBatch, Pipeline
from mpitrain.pipeline.schedules import SERIAL, Plan, plan_of
from mpitrain.pipeline.simulate import Cost, peak
from mpitrain.regions import share, shares
from mpitrain.run.count.operations import Count, Unlaunched, counted
from mpitrain.run.count.weightless import (
    NoAddress,
    Weightless,
    WeightlessForKernels,
    WeightlessMemory,
    WeightlessOnDevice,
)
from mpitrain.run.job import Job, Room, StepCounts
from mpitrain.run.trainer import places_of
from mpitrain.trace.recorder import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, SILENT, Silent
from mpitrain.transport.base import Several, Traffic
from mpitrain.transport.windows import Tenants

Sums = Numbers[tuple[str, str, int]]

MOST = 512
"""The largest number of micro-batches that an error proposes."""


class Unsent:
    """A transport without peers: no message is sent, and a receive leaves its array as it is."""

    admits_threads = False

    def __init__(
        self, rank: int, size: int, allocate: Callable[[int, Any], Any], recorder: Any = SILENT
    ):
        """allocate: (elements, dtype) -> an array, for the method `allocate`."""
        self.rank, self.size, self.recorder = rank, size, recorder
        self.hosts, self.members = ("",) * size, tuple(range(size))
        self.traffic, self.tenants, self._allocate = Traffic(), Tenants(), allocate

    def claim_tag(self) -> int:
        return 0

    def start_send(self, array: Any, to: int, tag: int = 0) -> Several:
        return Several([])

    def start_recv(self, array: Any, source: int, tag: int = 0) -> Several:
        return Several([])

    def gather_text(self, value: Any) -> list[Any]:
        return [value] * self.size

    def allocate(self, count: int, dtype: Any) -> Any:
        return self._allocate(count, dtype)


class CountedGroup(Group):
    """A group of which only one rank exists; its collectives only count themselves.

    sums       as in UnitCount, of the runs so far
    imbalance  rows that come to this rank on `routes`, over those that come to the mean rank
    """

    def __init__(self, transport: Any, arena: Arena, axis: str, sums: Sums, imbalance: float = 1.0):
        super().__init__(transport, arena=arena)
        self._axis, self._sums, self._imbalance = axis, sums, imbalance

    def routes(self, counts: np.ndarray) -> Routes:
        """Return routes on which every rank sends `imbalance` equal shares of its rows to this rank."""
        n = self.size
        shares = np.full((n, 1), (n - self._imbalance) / (n - 1))
        shares[self.rank] = self._imbalance
        own = np.floor(counts.sum() / counts.size * shares + np.zeros(counts.shape))
        return CountedRoutes(self, np.repeat(own[None].astype(np.int64), n, axis=0))

    def _noted(self, operation: str, array: Any, bind: Any) -> Reduction:
        sums, what = self._sums, (self._axis, operation, array.nbytes)
        return LocalReduction(lambda: sums.update([what]))


class CountedRoutes(Routes):
    """Routes that count the bytes away from this rank, as an all-to-all of equal parts with as many."""

    def bind(self, outgoing: Any, incoming: Any, is_return: bool = False) -> Reduction:
        n, rank = len(self.counts), self._transport.rank
        away = len(outgoing) - int(self.counts[rank, rank].sum())
        return self._group._noted("all-to-all", Equal(away * n // (n - 1), outgoing), None)


class Equal:
    """An array of so many rows, of which only the bytes are known."""

    def __init__(self, rows: int, like: Any):
        self.nbytes = rows * math.prod(like.shape[1:]) * like.dtype.itemsize


class Body:
    """The layer factory of a counted rank, with its operations, arena and memory.

    count   FLOPs and bytes so far
    arena   keeps account of activations
    sums    the collectives of tensor, context and expert parallelism so far
    layers  the layer factory
    """

    def __init__(self, job: Job, tp: int, cp: int, imbalance: float = 1.0):
        axes = job.axes
        self.device, self.count, device = job.device, Count(), job.device
        self.memory = WeightlessMemory(_kind_of(device))
        self.arena = Arena(self.memory)
        self.sums = Sums()
        group, context = (
            CountedGroup(self.endpoint(rank, ranks), self.arena, axis, self.sums)
            for axis, rank, ranks in (("tp", tp, axes.tp), ("cp", cp, axes.cp))
        )
        ops = counted(_leasing(device), self.count)
        own_context = context if axes.cp > 1 else None
        endpoint = self.endpoint(0, axes.ep)
        counts = endpoint, self.arena, "ep", self.sums, imbalance
        experts = CountedGroup(*counts) if axes.ep > 1 else None
        self.layers = layers_for(
            *(ops, group, job.config.layout, own_context),
            ep=experts,
            backend=cast(Backend, CountedBackend(self)),
            **job.layer_settings,
        )

    def endpoint(self, rank: int, ranks: int) -> Any:
        """Return a transport without peers; its recorder tells `count` when a backward runs."""
        return Unsent(
            rank, ranks, lambda count, dtype: self.memory.made((count,), dtype), _Phases(self.count)
        )

    def placed(self, rows: np.ndarray) -> Any:
        """Return rows of data on the device, as `Trainer.placed`."""
        half = self.device.half
        return self.taken(rows, half if half and rows.dtype.kind == "f" else rows.dtype)

    def taken(self, rows: np.ndarray, dtype: Any) -> Any:
        """Return rows on the device, in this dtype."""
        if isinstance(self.device.backend, DeviceBackend):
            return self.arena.take(rows.shape, dtype)
        return rows.astype(dtype, copy=False)


class CountedBackend:
    """The backend of a counted rank: nothing is copied to it, and what the host knows is on the host."""

    def __init__(self, body: Body):
        self._body = body

    def zeros(self, count: int, dtype: Any) -> Any:
        return self._body.memory.made((count,), np.dtype(dtype))

    def from_host(self, array: np.ndarray, arena: Arena) -> Any:
        return self._body.taken(array, array.dtype)

    def to_host(self, array: Any) -> Any:
        return array


class CountedReplica:
    """A replica whose arrays have no memory, with the methods that a pipeline calls."""

    def __init__(self, storage: Storage, body: "Body", loss: Loss, first: int, adds: bool = False):
        """adds: whether backwards add to gradients, as those of all micro-batches but the first do."""
        self.first = first
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
                leaf.filled = adds

    def open(self, unit: int, micro: int) -> Weights:
        return self._weights[unit]

    def gradients(self, unit: int) -> Gradients:
        return self._gradients[unit]

    def ready(self, unit: int, is_last: bool) -> None:
        pass

    def poll(self) -> None:
        pass

    def loss(self, logits: Any, targets: Any, scale: float) -> tuple[Any, Any]:
        return self._loss.gradient(logits, targets, scale, self._arena)


class _Phases(Silent):
    """A recorder that tells a `Count` whether a backward is running."""

    def __init__(self, count: Count):
        self._count = count

    def compute(self, *fields: int, **more: int) -> int:
        self._count.is_backward = fields[1] in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
        return 0

    def end(self, span: int) -> None:
        self._count.is_backward = False


class Counter:
    """Counts the memory and FLOPs of a training step, for all ranks with one tensor-parallel index.

    In mode `master` rank 0 computes the loss of all rows. Here each rank counts the loss of its own
    rows.

    imbalance  rows at this rank's experts, over those at the mean rank's
    tp      tensor-parallel index
    cp      context-parallel index; None: the last, which needs the most memory
    body    its layer factory, operations and arena
    chunks  its units, in chunks of the pipeline
    model   its units, before those of recomputed segments are joined
    """

    def __init__(self, job: Job, tp: int = 0, cp: int | None = None, imbalance: float = 1.0):
        self.job = job
        self.body = Body(job, tp, job.axes.cp - 1 if cp is None else cp, imbalance)
        self.chunks = job.cut(self.body.layers)
        self.model = self.chunks.model

    def storage(self, pp: int) -> tuple[Storage, list[range]]:
        """Return the layout of the tensors of pipeline stage `pp`, and `chunks` of a `Replica`."""
        job = self.job
        units, numbers = self.chunks.of_stage(job.plan.stage_of, pp)
        return Storage(units, job.config.precision.stored, job.axes.copies), numbers

    def step(self, pp: int, dp: int = 0) -> StepCounts:
        """Count one training step of pipeline stage `pp` in replica `dp`."""
        job, config, axes, plan = self.job, self.job.config, self.job.axes, self.job.plan
        body = self.body
        storage, _ = self.storage(pp)
        first = self.chunks.first(storage.units)
        replica: Any = CountedReplica(storage, body, loss_for(body.layers), first)
        endpoint, computed = body.endpoint(pp, axes.pp), job.device.half or storage.dtype
        rows = share(config.batch.size, dp, axes.dp)
        every = shares(len(rows), plan.micro_batches)
        parts = _unlike(every) if _is_serial(plan) else every
        plan = plan if len(parts) == len(every) else plan_of(SERIAL, 1, len(parts))
        pipe = Pipeline(plan, self.chunks, endpoint, replica, body.arena, computed, body.placed)
        inputs, targets = zeros(job.source, max(map(len, parts)), config.precision.stored)

        def loss(batch: MicroBatch, logits: Any) -> Any:
            right = body.taken(batch.targets, targets.dtype).reshape(-1)
            _, gradient = replica.loss(logits.reshape(len(right), -1), right, 1.0)
            return gradient.reshape(logits.shape)

        shape, is_text = (len(rows), *inputs.shape[1:]), job.source.form == "texts"
        is_cut = config.data.attend == "document" or is_text
        starts = np.zeros(shape, np.int32) if is_cut else None
        share_of_tokens, types = body.layers.tokens, starts if is_text else None
        places = places_of(body.layers, shape, starts, body.placed, types)
        inputs, targets = (share_of_tokens.cut(one) for one in (inputs, targets))
        before = replace(body.count)
        micros = list[MicroBatch]()
        for part in parts:
            own_places = places and places.of(part)
            now = Now(0, rows.start + part.start, len(part), True, own_places)
            micros.append(MicroBatch(len(micros), now, inputs[: len(part)], targets[: len(part)]))
        pipe.train(micros, loss)
        # FLOPs are proportional to rows.
        counted, flops = sum(map(len, parts)), body.count.flops - before.flops
        recomputed = body.count.recomputed - before.recomputed
        return StepCounts(
            pipe.peak_bytes, flops * len(rows) // counted, recomputed * len(rows) // counted
        )


def _is_serial(plan: Plan) -> bool:
    """Return whether there is one stage, which ends each micro-batch before it begins the next."""
    return (
        len(plan.by_stage) == 1 == peak(plan.by_stage[0], [Cost(0, 0, 0)] * len(plan.stage_of)).live
    )


def _unlike(parts: Sequence[range]) -> list[range]:
    """Return the micro-batches that suffice to find the peak, if each ends before the next begins.

    The first micro-batch writes gradients, the others add to them. Of the others, one of each size
    suffices.
    """
    rest = {len(part): part for part in parts[1:]}
    return [*parts[:1], *rest.values()]


def _kind_of(device: Device) -> type[Weightless]:
    if isinstance(device.backend, DeviceBackend):
        return WeightlessOnDevice
    return WeightlessForKernels if device.kernels else Weightless


def _leasing(device: Device) -> Ops:
    """Return the device's operations; they lease memory as on the device, and launch no kernels."""
    if device.kernels is None or device.multiply is None:
        return device.ops
    unlaunched: Any = Unlaunched(device.kernels)
    return cuda_ops(unlaunched, device.multiply, device.backend, device.tensor_cores)


def check_activations(job: Job, room: Room, rank: int) -> StepCounts:
    """Return this rank's counted step; raise ConfigError if the activations do not fit.

    The error names the fewest micro-batches that fit. A step of a plugin's model that cannot be counted
    passes.

    room  the free memory, and the bytes of parameters, gradients and optimizer state
    """
    try:
        activations, counts = bytes_needed(job, room, rank)
    except Exception as error:
        return StepCounts(problem=why_uncounted(error, job))
    if room.needed + activations <= room.free:
        return counts
    micro_batches, rows = job.plan.micro_batches, -(-job.config.batch.size // job.axes.dp)
    fitting = _fitting(job, room, rank)
    both, free, state, of_rows = gigabytes(
        room.needed + activations, room.free, room.needed, activations
    )
    raise ConfigError(
        f"{len(room.ranks)} rank(s) need {both}, {state} for parameters, gradients and optimizer state and "
        f"{of_rows} for activations {room.where}, with {micro_batches} micro-batch(es) of "
        f"{-(-rows // micro_batches)} row(s), but {free} {room.allowed}.",
        f"Set batch.micro_batches to {fitting[0]}: activations then need {gigabytes(fitting[1])[0]}."
        if fitting
        else f"{_savings(job.config)} model.width or model.context: no larger number of micro-batches "
        "fits.",
    )


def why_uncounted(error: Exception, job: Job) -> str:
    """Return the words of an error in counting for which training may go on: an operation or a layer
    of a plugin may need memory. All else in our own models is a fault, and is raised again.
    """
    of_plugin = isinstance(error, NoAddress) or MODELS.is_added(job.config.model.kind)
    if isinstance(error, MpitrainError) or not of_plugin:
        raise error
    return f"{type(error).__name__}: {error}"


def _savings(config: Config) -> str:
    ways = []
    if config.memory.attention == "whole":
        ways.append("memory.attention to tiled")
    if not config.memory.segment:
        ways.append("memory.recompute to unit")
    return f"Set {' or '.join(ways)}, or lower" if ways else "Lower"


def bytes_needed(job: Job, room: Room, rank: int) -> tuple[int, StepCounts]:
    """Return the activation bytes of all ranks in the memory of `room`, and this rank's counts."""
    axes = job.axes
    workers = axes.ranks - axes.servers
    tp, dp, pp, cp = axes.coords(rank) if rank < workers else (0, 0, 0, 0)
    counter = Counter(job, tp, cp)
    counts = counter.step(pp, dp)
    # The ranks of a stage need almost equal bytes, so each stage is counted once.
    stages = Numbers(axes.coords(r).pp for r in room.ranks if r < workers)
    peaks = {stage: counts.peak if stage == pp else counter.step(stage).peak for stage in stages}
    total = sum(number * peaks[stage] for stage, number in stages.items())
    return total, counts if rank < workers else StepCounts()


def _fitting(job: Job, room: Room, rank: int) -> tuple[int, int] | None:
    """Return the fewest micro-batches, more than those of the job, that fit in `room`, by bisection,
    and the bytes of activations that they need; None if no number fits.
    """
    best = None
    # Each micro-batch of every replica needs a row, also of one with fewer rows than this.
    low, high = job.plan.micro_batches + 1, min(job.config.batch.size // job.axes.dp, MOST)
    while low <= high:
        middle = (low + high) // 2
        proposed = next(filter(None, map(job.with_micro_batches, range(middle, high + 1))), None)
        nbytes = bytes_needed(proposed, room, rank)[0] if proposed else math.inf
        if proposed and nbytes <= room.free - room.needed:
            best = proposed.plan.micro_batches, int(nbytes)
            high = middle - 1
        elif proposed:
            low = proposed.plan.micro_batches + 1
        else:
            high = middle - 1
    return best
