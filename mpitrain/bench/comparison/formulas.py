"""The bytes that the busiest rank of a job sends per step, by formula.

Legend: B rows of a step, T tokens, C channels, L layers; t, d ranks along tp, dp.
"""

import re
from collections.abc import Sequence

import numpy as np

from mpitrain.bench.comparison.grammar import settings_of
from mpitrain.config import Config, with_settings
from mpitrain.optim import RULES
from mpitrain.optim.rule import TensorWise
from mpitrain.parallel.grid import share
from mpitrain.parallel.modes import mode_of
from mpitrain.parallel.traffic import CONTROL, CONTROL_ITEM, LETTERS, Formula, Sample
from mpitrain.pipeline.instructions import Send, fused_at_the_input, training_program
from mpitrain.pipeline.schedules import STREAMS
from mpitrain.plan.collective import plans_of
from mpitrain.run.build import Job
from mpitrain.run.choices import parse
from mpitrain.transport.base import Transport

OF_TENSORS = "2 (t-1)/t of 4 L + 2 times B T C, and of 3 B T numbers"
OF_SEQUENCES = "(t-1)/t of 2 L + 1 times B T C, and 2 (t-1)/t of the norms' gradients"
OF_STAGES = "B T C, and B T C back, to each neighbour"
OF_REPLICAS = "2 (d-1)/d S"
LAYOUT_LETTERS = {
    "B": "rows of a replica's step",
    "T": "tokens of a row",
    "C": "model.width",
    "L": "layers",
    "d": "replicas",
    "t": "ranks of a tensor-parallel group",
    **LETTERS,
}
"""{letter of a formula in words: its meaning}."""
SUMS = {"attention": 2, "mlp": 2, "embedding": 1, "head": 1}
"""{kind of unit: its all-reduces of B T C, forward and backward, in a tensor-parallel group}."""
COLUMN_PARALLEL = ("attention", "mlp", "head")
"""Kinds of units with a column-parallel layer."""


def formula_of(mode: str) -> Formula | None:
    """Return the formula of a mode of --modes without layouts, or None."""
    config = parse(with_settings({}, [*settings_of(mode)]))
    if _is_divided(config):
        return None
    return mode_of(config).traffic(config.replication)


def words_of(config: Config, workers: int) -> str:
    """Return the formula of a job in words; empty without a formula.

    workers  ranks that compute rows
    """
    tp, pp = config.layout.tp, config.layout.pp
    if not _is_divided(config):
        formula = mode_of(config).traffic(config.replication)
        return formula.words if formula else ""
    words = {
        OF_TENSORS: tp > 1,
        OF_SEQUENCES: config.layout.sequence_parallel,
        OF_STAGES: pp > 1,
        OF_REPLICAS: workers > tp * pp,
    }
    return "; ".join(text for text, is_sent in words.items() if is_sent)


def predicted(transport: Transport, job: Job) -> float | None:
    """Return the bytes that the busiest rank of a job sends per step by formula, or None.

    Collective: the ranks of a layout send different numbers.
    """
    trainer, data = job.trainer, job.data
    config = trainer.config
    if config.replication.wire != "none":
        return None
    # Other formulas than those of all-reduces assume rings.
    is_all_reduce = (config.replication.mode, config.replication.zero) == ("all-reduce", 0)
    if config.replication.algorithm != "ring" and not is_all_reduce:
        return None
    # No formula counts the sums over divided tensors, nor the matrices of Muon.
    if config.replication.zero and isinstance(RULES[config.optimizer.name].step, TensorWise):
        return None
    if _is_divided(config):
        # Replicas of asynchronous pipelines also sum more often.
        is_known = trainer.grid.axes.dp == 1 or config.pipeline.schedule not in STREAMS
        own = _of_layout(job) if is_known and _has_layout_formula(config) else None
        everyone = transport.gather_text(own)
        return None if None in everyone else max(everyone)
    formula = mode_of(config).traffic(config.replication)
    if formula is None:
        return None
    inputs, targets = data.batch(config.run.seed, 0, config.batch.size, range(1))
    sample = Sample(inputs.nbytes, targets.nbytes, targets.size * data.classes)
    return formula.of(trainer.replication.replica, sample)


def _is_divided(config: Config) -> bool:
    """Return whether ranks divide the layers of a model."""
    return config.layout.tp > 1 or config.layout.pp > 1


def _has_layout_formula(config: Config) -> bool:
    """Return whether `_of_layout` counts all messages of a job."""
    model, layout, replication = config.model, config.layout, config.replication
    is_plain = (
        model.kind == "gpt"
        and not (model.tied or model.freeze or config.lora.rank)
        and not isinstance(RULES[config.optimizer.name].step, TensorWise)
        and (replication.mode, replication.zero, replication.algorithm) == ("all-reduce", 0, "ring")
    )
    # Recomputation and slices of the logits repeat some sums.
    has_plain_sums = (
        layout.algorithm == "ring"
        and not layout.keep_gathered
        and (config.memory.recompute, config.memory.logit_chunks) == ("none", 1)
    )
    return is_plain and (layout.tp == 1 or has_plain_sums)


def _of_layout(job: Job) -> int:
    """Return the bytes that this rank sends in a step of a divided model."""
    trainer = job.trainer
    grid, config, storage = trainer.grid, trainer.config, trainer.storage
    messages = config.batch.micro_batches if config.pipeline.schedule in STREAMS else 1
    control = messages * _ring(grid.world.rank, grid.axes.ranks, CONTROL) * CONTROL_ITEM
    # With sequence parallelism, tensor-parallel ranks sum the gradients of norms.
    norms = sum(span.stop - span.start for span in storage.spans if span.partial)
    gradients = _ring(grid.coords.dp, grid.axes.dp, storage.length)
    gradients += _ring(grid.coords.tp, grid.axes.tp, norms)
    return gradients * storage.dtype.itemsize + control + _between_stages(job) + _within_layers(job)


def _rows(job: Job) -> list[int]:
    """Return the rows of each micro-batch of this rank."""
    rows, m = len(job.trainer.share()), job.trainer.config.batch.micro_batches
    return [len(share(rows, micro, m)) for micro in range(m)]


def _between_stages(job: Job) -> int:
    """Return the bytes of activations, and of their gradients, that this rank sends to stages."""
    trainer, rows = job.trainer, _rows(job)
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
    trainer, rows = job.trainer, _rows(job)
    grid, config, computed = trainer.grid, trainer.config, trainer.replication.replica.computed
    tokens, width = config.model.context, config.model.width
    tp, ranks = grid.coords.tp, grid.axes.tp
    kinds = [unit.name.rpartition(".")[2] for unit in trainer.units]
    sums = sum(SUMS.get(kind, 0) for kind in kinds)
    elements = sum(sums * _ring(tp, ranks, one * tokens * width) for one in rows)
    if config.layout.sequence_parallel:
        # Column-parallel layers gather their inputs again in backward.
        layers = sum(kind in COLUMN_PARALLEL for kind in kinds)
        elements += layers * sum(rows) * tokens * width * (ranks - 1) // ranks
    # The loss needs a maximum of each row, and two sums in one message.
    facts = sum(_ring(tp, ranks, k * one * tokens) for one in rows for k in (1, 2))
    of_loss = facts * _itemsize_of_facts(computed) if "head" in kinds else 0
    return elements * computed.itemsize + of_loss


def _ring(rank: int, ranks: int, count: int) -> int:
    """Return the elements that a rank sends in a ring all-reduce."""
    plans = plans_of("allreduce", "ring", ("",) * ranks, count)[rank]
    return sum(t.stop - t.start for plan in plans for step in plan.steps for t in step.sends)


def letters_in(words: Sequence[str]) -> dict[str, str]:
    """Return {letter: meaning} of the letters in these formulas."""
    used = set(re.findall(r"n'|\b(?:lg|[A-Zdhmnst])\b(?!')", " ".join(words)))
    return {letter: meaning for letter, meaning in LAYOUT_LETTERS.items() if letter in used}


def _itemsize_of_facts(dtype: np.dtype) -> int:
    """Return the bytes of the maxima and sums of a row in the split cross-entropy."""
    return 8 if dtype == np.float64 else 4
