"""One training step of one rank without arithmetic: its activation memory and its FLOPs.

The real layers, arena, pipeline program and pools run on arrays without memory (ops/counted.py).
No parameter exists, and no message is sent. So any rank counts any other rank's step.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpitrain.config import Config
from mpitrain.data import Source, Unopened, zeros
from mpitrain.layers.flat import Storage
from mpitrain.layers.now import Documents
from mpitrain.ops.device import Device
from mpitrain.parallel.grid import Axes, share
from mpitrain.parallel.tensor.layer_factory import loss_for
from mpitrain.pipeline.chunks import Units, cut_in_chunks
from mpitrain.pipeline.instructions import Plan
from mpitrain.pipeline.memory import peak
from mpitrain.pipeline.partition import TIME
from mpitrain.pipeline.pipeline import Pipeline, input_shape, own
from mpitrain.pipeline.schedules import plan_of
from mpitrain.pipeline.simulate import Cost
from mpitrain.run.counting.body import Body, Replica
from mpitrain.run.counting.units import UnitCount, UnitCounter

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


class StepCounts(NamedTuple):
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


class Counter:
    """Counts the memory and FLOPs of a training step, for all ranks with one tensor-parallel index.

    In mode `master` rank 0 computes the loss of all rows. Here each rank counts that of its own
    rows.

    units  the model, as a function of a layer factory
    tp     tensor-parallel index
    """

    def __init__(self, job: Scheduled, source: Source | Unopened, units: Units, tp: int = 0):
        config, axes, plan, device = job
        self._job, self._source = job, source
        self._body = Body(device, config, tp, axes.tp)
        # Before the units are timed, the balanced partition is counted.
        partition = "" if config.pipeline.partition == TIME else config.pipeline.partition
        self._chunks = cut_in_chunks(
            units,
            self._body.layers,
            plan.stage_of,
            partition,
            config.model.freeze,
            config.lora,
        )

    def step(self, pp: int, dp: int = 0) -> StepCounts:
        """Count one training step of a pipeline stage, in the dp-th replica."""
        config, axes, plan, device = self._job
        body, chunks = self._body, self._chunks.chunks
        units = [unit for chunk in own(plan.stage_of, pp) for unit in chunks[chunk]]
        storage = Storage(units, config.precision.stored, axes.dp)
        replica: Any = Replica(storage, body, loss_for(body.layers), self._chunks.first(units))
        endpoint, computed = body.endpoint(pp, axes.pp), device.half or storage.dtype
        rows = share(config.batch.size, dp, axes.dp)
        every = [share(len(rows), n, plan.micro_batches) for n in range(plan.micro_batches)]
        shares = _unlike(every) if _is_serial(plan) else every
        plan = plan if len(shares) == len(every) else plan_of(SERIAL, 1, len(shares))
        pipe = Pipeline(plan, chunks, endpoint, replica, body.arena, computed, body.layers.now)
        inputs, targets = zeros(self._source, max(map(len, shares)), config.precision.stored)

        def loss(micro: int, logits: Any) -> Any:
            right = body.placed(targets[: len(shares[micro])]).reshape(-1)
            _, gradient = replica.loss(logits.reshape(len(right), -1), right, 1.0)
            return gradient.reshape(logits.shape)

        documents = None
        if config.data.attend == "document":
            starts = np.zeros((len(rows), *inputs.shape[1:]), np.int32)
            documents = Documents(body.placed(starts), body.placed(starts))
        before = replace(body.count)
        pipe.train(
            [
                (0, rows.start + part.start, len(part), True, documents and documents.of(part))
                for part in shares
            ],
            [(len(part), *inputs.shape[1:]) for part in shares],
            lambda micro: body.placed(inputs[: len(shares[micro])]),
            loss,
        )
        # FLOPs are proportional to rows.
        counted, flops = sum(map(len, shares)), body.count.flops - before.flops
        recomputed = body.count.recomputed - before.recomputed
        return StepCounts(
            pipe.peak_bytes, flops * len(rows) // counted, recomputed * len(rows) // counted
        )

    def units(self, pp: int) -> list[UnitCount]:
        """Count each unit of a pipeline stage, for the largest micro-batch of replica 0."""
        config, axes, plan, device = self._job
        body, chunks, counts = self._body, self._chunks.chunks, list[UnitCount]()
        rows = math.ceil(config.batch.size / axes.dp / plan.micro_batches)
        inputs, targets = zeros(self._source, rows, config.precision.stored)
        for chunk in own(plan.stage_of, pp):
            storage = Storage(chunks[chunk], config.precision.stored, axes.dp)
            replica = Replica(
                storage, body, loss_for(body.layers), self._chunks.first(chunks[chunk])
            )
            computed = device.half or storage.dtype

            def first(chunk: int = chunk, computed: Any = computed) -> Any:
                body.layers.now.set(0, 0, rows, True)
                if chunk == 0:
                    return body.placed(inputs)
                return body.arena.take(input_shape(chunks, chunk, inputs.shape), computed)

            last = (lambda: body.placed(targets)) if chunk == len(chunks) - 1 else None
            counts += UnitCounter(body, chunks[chunk], replica).count(first, last)
        return counts


def _is_serial(plan: Plan) -> bool:
    """Return whether one stage ends each micro-batch before it begins the next."""
    return len(plan.lists) == 1 == peak(plan.lists[0], [Cost(0, 0, 0)] * len(plan.stage_of)).live


def _unlike(shares: Sequence[range]) -> list[range]:
    """Return the micro-batches that suffice to find the peak, if each ends before the next begins.

    The first one writes gradients, the others add to them. Of these, one of each size suffices.
    """
    rest = {len(part): part for part in shares[1:]}
    return [*shares[:1], *rest.values()]
