"""The bytes that the busiest rank of a job sends per step, predicted by formulas.

Legend: B rows of a step, T tokens of a row, C channels, L layers; t ranks of a tensor-parallel
group, c of a context-parallel group, d ranks with the same parameters, S bytes of all gradients.
"""

import math
import re
from collections.abc import Sequence

import numpy as np

from mpitrain.collectives.compression import LANE, square, tiles
from mpitrain.collectives.engine.arithmetic import BLOCK, CODECS, Wire
from mpitrain.config import Config
from mpitrain.data import targets_of
from mpitrain.layers.base import TokenShare
from mpitrain.layers.flat import Bucket, Entry, Storage
from mpitrain.models.table import form_for
from mpitrain.optim import RULES
from mpitrain.optim.tensors import TensorWise
from mpitrain.parallel.weight_stashing import PipeDream
from mpitrain.pipeline.schedules import STREAMS, Send, fused_at_the_input, training_program
from mpitrain.regions import shares
from mpitrain.run.job import Job
from mpitrain.tools.plan.mode_traffic import (
    LETTERS,
    RankFacts,
    Sample,
    formula_of,
    of_partial_sums,
    of_replicas,
    sent_in_ring,
    sent_to_agree,
)
from mpitrain.transport.base import Transport

OF_TENSORS = "2 (t-1)/t of 4 L + 2 times B T C, and of 3 B T numbers"
OF_SEQUENCES = "(t-1)/t of 2 L + 1 times B T C, and 2 (t-1)/t of the norms' gradients"
OF_CONTEXT = "of L times B T C/t"
OF_STAGES = "B T C, and B T C back, to each neighbour"
OF_REPLICAS = "2 (d-1)/d S"
LAYOUT_LETTERS = {
    "B": "rows of a replica's step",
    "T": "tokens of a row",
    "C": "model.width",
    "L": "layers",
    "c": "ranks of a context-parallel group",
    "d": "replicas, times c with layout.cp",
    "t": "ranks of a tensor-parallel group",
    **LETTERS,
}
"""{letter of a formula in words: its meaning}."""
CODED = {
    **dict.fromkeys(CODECS, "2 (d-1)/d S in the wire format, in blocks of 256 numbers"),
    "topk": "(d-1) times 8 bytes for each number that a replica chooses",
    "powersgd": "2 (d-1)/d of all factors, and of the numbers outside matrices",
}
"""{wire format: its formula in words}."""
SINGLE = 4
"""Bytes of a float32."""
FORWARD = {"attention": 1, "mlp": 1, "embedding": 1}
BACKWARD = {"attention": 1, "mlp": 1, "head": 1}
"""{kind of unit: number of its all-reduces of B T C elements over tp}, forward and backward."""
COLUMN_PARALLEL = ("attention", "mlp", "head")
"""Kinds of units with a column-parallel layer."""


def words_of(config: Config, workers: int) -> str:
    """Return the formulas of a job's traffic in words; empty if there is none.

    workers  number of ranks that compute gradients
    """
    tp, cp, pp, wire = config.layout.tp, config.layout.cp, config.layout.pp, config.replication.wire
    formula = formula_of(config)
    if not _is_divided(config) and wire == "none":
        return formula.words if formula else ""
    has_replicas, zero = workers > tp * pp, config.replication.zero
    sharded = re.sub(r"\bn\b", "d", formula.words) if formula and zero else ""
    words = {
        OF_TENSORS: tp > 1,
        OF_SEQUENCES: config.layout.sequence_parallel,
        _context_words(config): cp > 1,
        OF_STAGES: pp > 1,
        OF_REPLICAS: has_replicas and not zero and wire == "none",
        CODED[wire.partition(":")[0]] if wire != "none" else "": has_replicas and wire != "none",
        "(d-1)/d S": has_replicas and zero and wire != "none",
        sharded: has_replicas and zero and wire == "none",
    }
    sent = [text for text, is_sent in words.items() if is_sent]
    if cp > 1:  # A rank has T/c tokens of each row.
        sent = [re.sub("T(?! C/t)", "T/c", text) for text in sent]
    return "; ".join(sent if tp > 1 else [text.replace("C/t", "C") for text in sent])


def predicted(transport: Transport, job: Job) -> float | None:
    """Return the bytes that the busiest rank of a job sends per step; None if no formula counts them.

    Collective, because the ranks of a layout send different numbers of bytes.
    """
    trainer, data = job.trainer, job.data
    config = trainer.config
    # Other formulas than those of all-reduces assume rings.
    is_all_reduce = (config.replication.mode, config.replication.zero) == ("all-reduce", 0)
    is_coded = config.replication.wire != "none"
    if config.replication.algorithm != "ring" and (is_coded or not is_all_reduce):
        return None
    # No formula counts the sums over divided tensors, nor the matrices of Muon.
    if config.replication.zero and isinstance(RULES[config.optimizer.name].step, TensorWise):
        return None
    if _is_divided(config) or is_coded:
        own = of_layout(job) if has_formula(config) or not _is_divided(config) else None
        everyone = transport.gather_text(own)
        return None if None in everyone else max(everyone)
    formula = formula_of(config)
    if formula is None:
        return None
    inputs, targets = data.batch(config.run.seed, 0, config.batch.size, range(1))
    logits = targets.size * (data.classes if targets_of(data) == "classes" else 1)
    sample = Sample(inputs.nbytes, targets.nbytes, logits)
    return formula.of(RankFacts.of(trainer), sample)


def _is_divided(config: Config) -> bool:
    return config.layout.tp > 1 or config.layout.cp > 1 or config.layout.pp > 1


def letters_in(words: Sequence[str]) -> dict[str, str]:
    used = set(re.findall(r"n'|\b(?:lg|[A-Zcdhmnst])\b(?!')", " ".join(words)))
    return {letter: meaning for letter, meaning in LAYOUT_LETTERS.items() if letter in used}


def has_formula(config: Config) -> bool:
    """Return whether `of_layout` counts all messages of a tensor-parallel or pipeline job."""
    model, layout, replication = config.model, config.layout, config.replication
    is_plain = (
        model.kind in ("gpt", "llama", "bert")
        and form_for(model.kind, config.data.source) == "tokens"
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
    """Return the bytes that this rank sends in a step, counted from its layers and stages.

    None if the bytes of its gradients are not known.
    """
    gradients = of_gradients(job)
    if gradients is None:
        return None
    grid, config = job.trainer.grid, job.trainer.config
    messages = config.batch.micro_batches if config.pipeline.schedule in STREAMS else 1
    control = messages * sent_to_agree(grid.world.rank, grid.axes.ranks, config.model.experts)
    return gradients + control + _between_stages(job) + _within_layers(job) + _within_rows(job)


def of_gradients(job: Job) -> float | None:
    """Return the bytes of gradients that this rank sends in a step, and with ZeRO also of parameters.

    None if they are not known.
    """
    trainer = job.trainer
    grid, config = trainer.grid, trainer.config
    d, tp, replica = grid.axes.copies, grid.axes.tp, trainer.replica
    facts = RankFacts.of(trainer)
    summed = of_partial_sums(facts)
    moved = _compressed(job) if replica.wire.name != "none" else of_replicas(facts)
    if moved is None:
        return None
    if not isinstance(replica, PipeDream):
        return moved + summed
    # A stage sums the squares of its gradients over tp, and its ignored targets over dp.
    own = 8 * (sent_in_ring(grid.coords.tp, tp, 2) + sent_in_ring(grid.copies.rank, d, 1))
    return config.batch.micro_batches // replica.every * (moved + summed + own)


def _compressed(job: Job) -> float:
    """Return the bytes that this rank sends to sum gradients in a wire format, mean over the run's
    steps.
    """
    trainer = job.trainer
    grid, config = trainer.grid, trainer.config
    storage, replica = trainer.storage, trainer.replica
    rank, d = grid.copies.rank, grid.copies.size
    whole = sent_in_ring(rank, d, storage.length) * storage.dtype.itemsize
    coded = in_format(storage, replica.buckets.buckets, replica.wire, rank, d)
    steps = config.run.steps
    dense = min(config.replication.exact_steps(steps), steps) / steps
    # A wire format always does an all-reduce, so ZeRO 1 adds an all-gather of the parameters.
    gathered = storage.length * replica.computed.itemsize * (d - 1) / d
    return dense * whole + (1 - dense) * coded + (gathered if config.replication.zero else 0)


def _micro_batch_rows(job: Job) -> list[int]:
    rows, m = len(job.trainer.share()), job.trainer.config.batch.micro_batches
    return [len(each) for each in shares(rows, m)]


def _between_stages(job: Job) -> int:
    trainer, rows = job.trainer, _micro_batch_rows(job)
    config, lowest = trainer.config, trainer.pipe.lowest
    plan = fused_at_the_input(trainer.job.plan, lowest)
    program = training_program(plan, lowest)[trainer.grid.coords.pp]
    sent = sum(rows[each.micro] for each in program if isinstance(each, Send))
    elements = sent * config.model.context // config.layout.cp * config.model.width
    if config.layout.sequence_parallel:
        elements //= trainer.grid.axes.tp
    return elements * trainer.replica.computed.itemsize


def _within_layers(job: Job) -> int:
    trainer, rows = job.trainer, _micro_batch_rows(job)
    grid, config, replica = trainer.grid, trainer.config, trainer.replica
    tokens, width = config.model.context // config.layout.cp, config.model.width
    computed = replica.computed
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


def _within_rows(job: Job) -> int:
    """Return the bytes that this rank sends in the attention of context parallelism."""
    trainer, grid = job.trainer, job.trainer.grid
    config, replica = trainer.config, trainer.replica
    kinds = [unit.name.rpartition(".")[::2] for unit in trainer.units]
    layers, trained = (
        sum(_exchanges(config, block) for block, kind in some if kind == "attention")
        for some in (kinds, kinds[replica.first :])
    )
    forward, backward, again, power = _exchanged(config)
    inside = config.model.heads * config.model.head_channels
    tokens = sum(_micro_batch_rows(job)) * config.model.context
    columns = (layers * forward + trained * (backward + again)) * inside / grid.axes.tp
    return round(tokens * columns / grid.axes.cp**power) * replica.computed.itemsize


def _exchanges(config: Config, block: str) -> int:
    """Return with how many ranks a rank exchanges in the attention of a block: with all, but in a
    ring with a window.
    """
    cp, model = config.layout.cp, config.model
    if config.layout.cp_mode != "ring" or not model.window:
        return cp - 1
    window = model.windows[int(re.sub(r"\D", "", block))]
    return len(TokenShare(0, cp, True).steps(model.context, window)) - 1


def _exchanged(config: Config) -> tuple[float, float, float, int]:
    """Return what an attention exchanges forward, backward and in a repeated forward, as multiples of
    B T C/t, and the power of c that divides them.

    A rank of Ulysses keeps one of the c parts of its T/c tokens: queries, keys, values and output. In a
    ring keys and values go c - 1 times, and so do their gradients.
    """
    kv = 2 * (config.model.kv_heads or config.model.heads) / config.model.heads
    is_ring, recompute = config.layout.cp_mode == "ring", config.memory.recompute
    forward, backward = (kv, 2 * kv) if is_ring else (2 + kv, 2 + kv)
    repeats = config.memory.segment or (is_ring and recompute == "attention")
    return forward, backward, forward if repeats else 0, 1 if is_ring else 2


def _context_words(config: Config) -> str:
    *times, power = _exchanged(config)
    layers = map(str, range(config.model.layers))
    ranks = " or ".join(str(n) for n in sorted({_exchanges(config, layer) for layer in layers}))
    ranks = "(c-1)" if ranks == str(config.layout.cp - 1) else ranks
    return f"{sum(times):g} {ranks}/c{'^2' * (power - 1)} {OF_CONTEXT}"


def in_format(storage: Storage, buckets: Sequence[Bucket], wire: Wire, rank: int, d: int) -> int:
    """Return the bytes that a replica sends in a step to sum its buckets in a wire format.

    A bucket of tensors that other ranks of the replica store, too, is sent as float32.

    rank  index of the replica
    d     number of replicas
    """
    total = 0
    for bucket in buckets:
        count = bucket.stop - bucket.start
        if bucket.holders:
            total += SINGLE * sent_in_ring(rank, d, count)
        elif wire.name == "topk":
            total += (d - 1) * 2 * SINGLE * math.ceil(wire.amount * count)
        elif wire.name == "powersgd":
            own = [e for e in storage.entries if bucket.start <= e.start < bucket.stop]
            total += SINGLE * sum(
                sent_in_ring(rank, d, elements)
                for elements in _factors(own, count, int(wire.amount))
            )
        else:
            total += _in_blocks(count, d) * CODECS[wire.name].block_bytes
    return total


def _in_blocks(count: int, d: int) -> int:
    """Return the number of blocks (of the wire format) that a replica sends for a bucket.

    A bucket is summed in chains of d * LANE elements, the last of which may be shorter. For each
    chain a replica sends 2 (d - 1) chunks, each rounded up to whole blocks.
    """
    chains, rest = divmod(count, d * LANE)
    return 2 * (d - 1) * (chains * (LANE // BLOCK) + -(-rest // (d * BLOCK)))


def _factors(entries: Sequence[Entry], count: int, k: int) -> tuple[int, int]:
    """Return the number of elements of both messages by which PowerSGD of rank k sums a bucket.

    The first message has the left factors; the second has the right factors and the elements of all
    tensors that are not compressed.
    """
    shapes = [entry.parameter.local_shape for entry in entries]
    matrices = [m for shape in shapes if len(shape) == 2 for m in tiles(0, *shape)]
    every = matrices or [square(count)]
    coded = [m for m in every if k * (m.rows + m.columns) < m.rows * m.columns]
    outside = count - sum(m.rows * m.columns for m in coded)
    return k * sum(m.rows for m in coded), k * sum(m.columns for m in coded) + outside
