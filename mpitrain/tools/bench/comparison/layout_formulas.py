"""The bytes that a rank of a divided model sends in a step: gradients, activations, partial sums.

Legend: B rows of a step, T tokens, C channels, L layers; t, d ranks along tp, dp.
"""

import numpy as np

from mpitrain.config import Config
from mpitrain.optim import RULES
from mpitrain.optim.rule import TensorWise
from mpitrain.parallel.buckets import Buckets
from mpitrain.parallel.grid import divisor, share
from mpitrain.parallel.mode import (
    CONTROL,
    CONTROL_ITEM,
    Travelled,
    by_micro_batch,
    by_use,
    once,
    sent_in_ring,
    sharded,
)
from mpitrain.parallel.weight_stashing import StageUpdate
from mpitrain.pipeline.instructions import Send, fused_at_the_input, training_program
from mpitrain.pipeline.schedules import STREAMS
from mpitrain.run.build import Job
from mpitrain.tools.bench.comparison.wire_formulas import in_format

FORWARD = {"attention": 1, "mlp": 1, "embedding": 1}
BACKWARD = {"attention": 1, "mlp": 1, "head": 1}
"""{kind of unit: number of its all-reduces of B T C elements over tp}, forward and backward."""
COLUMN_PARALLEL = ("attention", "mlp", "head")
"""Kinds of units with a column-parallel layer."""
TRAVELLED: dict[int, Travelled] = {1: once, 2: by_micro_batch, 3: by_use}
"""{stage of ZeRO: function that counts the elements that it moves}."""


def has_formula(config: Config) -> bool:
    """Return whether `of_layout` counts all messages of a job."""
    model, layout, replication = config.model, config.layout, config.replication
    is_plain = (
        model.kind == "gpt"
        and not model.tied
        and not isinstance(RULES[config.optimizer.name].step, TensorWise)
        and (replication.mode, replication.algorithm) == ("all-reduce", "ring")
    )
    # Recomputation and slices of the logits repeat some sums.
    has_plain_sums = (
        layout.algorithm == "ring"
        and not layout.keep_gathered
        and (config.memory.recompute, config.memory.logit_chunks) == ("none", 1)
    )
    return is_plain and (layout.tp == 1 or has_plain_sums)


def of_layout(job: Job) -> float | None:
    """Return the bytes that this rank sends in a step of a divided model; None if not known."""
    trainer = job.trainer
    grid, config = trainer.grid, trainer.config
    messages = config.batch.micro_batches if config.pipeline.schedule in STREAMS else 1
    control = messages * sent_in_ring(grid.world.rank, grid.axes.ranks, CONTROL) * CONTROL_ITEM
    gradients = of_gradients(job)
    if gradients is None:
        return None
    return gradients + control + _between_stages(job) + _within_layers(job)


def of_gradients(job: Job) -> float | None:
    """Return the bytes that this rank sends to replicas in a step; None if not known.

    They are gradients, and with ZeRO also parameters.
    """
    trainer = job.trainer
    grid, config = trainer.grid, trainer.config
    storage, replica = trainer.storage, trainer.replication.replica
    d, tp, stage = grid.axes.dp, grid.axes.tp, config.replication.zero
    # Gradients of replicated tensors are partial sums: tensor-parallel ranks add them up.
    partial = sum(span.stop - span.start for span in storage.spans if span.partial)
    if stage > 1:
        partial //= divisor(grid.axes, grid.world.transport.hosts, config.replication.shard)
    summed = sent_in_ring(grid.coords.tp, tp, partial) * storage.dtype.itemsize
    if replica.wire.name != "none":
        moved = _compressed(job)
    elif stage:
        of_shards = sharded(replica, TRAVELLED[stage])
        return None if of_shards is None else of_shards + summed
    else:
        moved = sent_in_ring(grid.coords.dp, d, storage.length) * storage.dtype.itemsize
    end = trainer.replication.step_end
    if not isinstance(end, StageUpdate):
        return moved + summed
    # A stage sums the squares of its gradients over tp, and its ignored targets over dp.
    own = 8 * (sent_in_ring(grid.coords.tp, tp, 2) + sent_in_ring(grid.coords.dp, d, 1))
    return config.batch.micro_batches // end.every * (moved + summed + own)


def _compressed(job: Job) -> float:
    """Return the bytes of sums in a wire format, mean over the steps of the run."""
    trainer = job.trainer
    grid, config = trainer.grid, trainer.config
    storage, replica = trainer.storage, trainer.replication.replica
    rank, d = grid.coords.dp, grid.axes.dp
    whole = sent_in_ring(rank, d, storage.length) * storage.dtype.itemsize
    reducer = trainer.replication.reducer
    assert isinstance(reducer, Buckets)
    coded = in_format(storage, reducer.buckets, replica.wire, rank, d)
    dense = min(config.dense_steps, config.run.steps) / config.run.steps
    # A wire format always does an all-reduce, so ZeRO 1 adds an all-gather of the parameters.
    gathered = storage.length * replica.computed.itemsize * (d - 1) / d
    return dense * whole + (1 - dense) * coded + (gathered if config.replication.zero else 0)


def _micro_batch_rows(job: Job) -> list[int]:
    rows, m = len(job.trainer.share()), job.trainer.config.batch.micro_batches
    return [len(share(rows, micro, m)) for micro in range(m)]


def _between_stages(job: Job) -> int:
    """Return the bytes of activations, and of their gradients, that this rank sends to stages."""
    trainer, rows = job.trainer, _micro_batch_rows(job)
    config, lowest = trainer.config, trainer.pipe.lowest
    plan = fused_at_the_input(trainer.resolved.plan, lowest)
    program = training_program(plan, lowest)[trainer.grid.coords.pp]
    sent = sum(rows[each.micro] for each in program if isinstance(each, Send))
    elements = sent * config.model.context * config.model.width
    if config.layout.sequence_parallel:
        elements //= trainer.grid.axes.tp
    return elements * trainer.replication.replica.computed.itemsize


def _within_layers(job: Job) -> int:
    """Return the bytes that this rank sends to its tensor-parallel group."""
    trainer, rows = job.trainer, _micro_batch_rows(job)
    grid, config, replica = trainer.grid, trainer.config, trainer.replication.replica
    tokens, width, computed = config.model.context, config.model.width, replica.computed
    tp, ranks = grid.coords.tp, grid.axes.tp
    kinds = [unit.name.rpartition(".")[2] for unit in trainer.units]
    # Frozen units before the first trained one run no backward.
    behind = kinds[replica.first :]
    sums = sum(FORWARD.get(kind, 0) for kind in kinds) + sum(
        BACKWARD.get(kind, 0) for kind in behind
    )
    elements = sum(sums * sent_in_ring(tp, ranks, count * tokens * width) for count in rows)
    if config.layout.sequence_parallel:
        # Column-parallel layers gather their inputs again in backward. An embedding gathers in
        # backward instead of forward.
        gathers = sum(kind in COLUMN_PARALLEL for kind in behind)
        gathers -= "embedding" in kinds[: replica.first]
        elements += gathers * sum(rows) * tokens * width * (ranks - 1) // ranks
    # The split cross-entropy needs a maximum of each row, and two sums in one message.
    facts = sum(sent_in_ring(tp, ranks, k * count * tokens) for count in rows for k in (1, 2))
    of_loss = facts * (8 if computed == np.float64 else 4) if "head" in kinds else 0
    return elements * computed.itemsize + of_loss
