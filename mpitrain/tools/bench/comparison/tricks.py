"""One job with and without each trick (a setting that may save time or memory), measured in turns."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mpitrain.config import Config, with_settings
from mpitrain.data.prefetch import Prefetched
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.models.table import MODELS
from mpitrain.ops.host.attention import TILED_FROM
from mpitrain.run.build import build
from mpitrain.run.choices import parse
from mpitrain.run.count.step import check_activations
from mpitrain.run.job import Job, Room, StepCounts
from mpitrain.run.rules import of_model
from mpitrain.tools.bench.comparison.formulas import predicted
from mpitrain.tools.bench.table import UNSURE
from mpitrain.tools.bench.training.steps import Ours, alternate, shown
from mpitrain.tools.bench.turns import Row, compared
from mpitrain.tools.text_table import TextColumn
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

Settings = Mapping[str, Any]
WITHOUT = "without"
"""The side of a job without a trick."""
LARGEST = 4
"""Largest number of micro-batches in gradient accumulation, and of slices of the logits."""


class Trick(NamedTuple):
    """A setting that may make a job faster or smaller.

    on      (job) -> {key: value} that turn the trick on
    off     {key: value} that turn it off
    reason  (job) -> why the trick does not apply to the job; empty if it may apply
    said    whether it makes training faster, and smaller, according to the table in HuggingFace's guide
            to efficient training on one GPU; empty: the table does not have it
    is_on   (job) -> whether the job has the trick; None: the job has it unless its values are `off`
    """

    on: Callable[[Job], Settings]
    off: Settings
    reason: Callable[[Job], str]
    said: str = ""
    is_on: Callable[[Job], bool] | None = None

    def is_used(self, job: Job) -> bool:
        if self.is_on:
            return self.is_on(job)
        values = job.config.flat()
        return any(values[key] != value for key, value in self.off.items())


Reason = Callable[[Job], str]


def of_key(
    key: str,
    on: Any,
    off: Any,
    *reasons: Reason,
    said: str = "",
    is_on: Callable[[Job], bool] | None = None,
) -> Trick:
    """Return the trick that one key turns on and off."""
    return Trick(lambda job: {key: on}, {key: off}, first_of(*reasons), said, is_on)


def first_of(*reasons: Reason) -> Reason:
    return lambda job: next(filter(None, (reason(job) for reason in reasons)), "")


def unless(holds: Callable[[Job], bool], text: str) -> Reason:
    return lambda job: "" if holds(job) else text


def is_one_of(key: str, *values: Any, text: str = "") -> Reason:
    """Return the reason against a job whose key has another value than these."""
    other = text or f"{key} is not {values[0]}"
    return unless(lambda job: job.config.flat()[key] in values, other)


def _replica_rows(job: Job) -> int:
    return job.config.batch.size // job.axes.dp


def _divides(job: Job) -> str:
    """Return why all ranks with the same parameters could not share rows; empty if they could."""
    layout = job.config.layout.model_copy(update={"cp": job.axes.copies, "dp": 1})
    rules = of_model(job.config.model_copy(update={"layout": layout}))
    return next((law for is_broken, law, _ in rules if is_broken), "")


def _zero(stage: int) -> Trick:
    higher = "replication.zero is higher: the job shards more already"
    reasons = REPLICAS, ALL_REDUCE, is_one_of("replication.zero", *range(stage + 1), text=higher)
    is_on = lambda job: job.config.replication.zero == stage  # noqa: E731
    return of_key("replication.zero", stage, 0, *reasons, said="no, yes", is_on=is_on)


def _optimizer(name: str) -> Trick:
    usual = is_one_of("optimizer.name", "adamw", name)
    return of_key("optimizer.name", name, "adamw", usual, said="yes, yes")


REPLICAS = unless(lambda job: job.axes.dp > 1, "there is one replica")
COPIES = unless(lambda job: job.axes.copies > 1, "there is one replica")
ALL_REDUCE = is_one_of("replication.mode", "all-reduce")
ON_CPU = is_one_of("device.kind", "cpu")
TOKENS = unless(
    lambda job: "tokens" in MODELS[job.config.model.kind].takes, "model.kind takes no tokens"
)
NOT_FLOAT64 = unless(lambda job: job.config.precision.compute != "float64", "the job is in float64")
ONE_STAGE = unless(lambda job: job.axes.pp == 1, "a pipeline needs its micro-batches")
SEVERAL_ROWS = unless(lambda job: _replica_rows(job) > 1, "a replica has one row a step")
SLICES = unless(lambda job: job.axes.tp > 1, "layout.tp is 1")
EXACT = is_one_of("replication.wire", "none", "int8", text="replication.wire is another format")


def _is_tiled(job: Job) -> bool:
    wanted, context = job.config.memory.attention, job.config.model.context
    return wanted == "tiled" or (wanted == "auto" and context >= TILED_FROM)


TRICKS: dict[str, Trick] = {
    "mixed precision": of_key(
        "precision.compute", "bfloat16", "float32", NOT_FLOAT64, said="yes, maybe"
    ),
    "gradient accumulation": Trick(
        lambda job: {"batch.micro_batches": min(LARGEST, _replica_rows(job))},
        {"batch.micro_batches": 1},
        first_of(ONE_STAGE, SEVERAL_ROWS),
        "no, yes",
    ),
    "recomputation": of_key("memory.recompute", "unit", "none", said="no, yes"),
    "attention in tiles": of_key(
        "memory.attention", "tiled", "whole", TOKENS, ON_CPU, is_on=_is_tiled
    ),
    "logits in slices": of_key("memory.logit_chunks", LARGEST, 1),
    **{f"ZeRO {stage}": _zero(stage) for stage in (1, 2, 3)},
    "sequence parallelism": of_key("layout.sequence_parallel", True, False, SLICES),
    "context parallelism": Trick(
        lambda job: {"layout.cp": job.axes.copies, "layout.dp": 1},
        {"layout.cp": 1, "layout.dp": 0},
        first_of(COPIES, ALL_REDUCE, _divides),
        is_on=lambda job: job.axes.cp > 1,
    ),
    "LoRA": of_key("lora.rank", 8, 0, TOKENS, said="no, yes"),
    "emptied memory": of_key("memory.release_every", 1, 0, said="no, yes"),
    "larger batch": Trick(
        lambda job: {"batch.size": 2 * job.config.batch.size}, {}, lambda job: "", "yes, yes"
    ),
    "another optimizer": _optimizer("adafactor"),
    "8-bit optimizer": _optimizer("adamw8bit"),
    "overlap": of_key("replication.overlap", True, False, REPLICAS, ALL_REDUCE),
    "prefetch": of_key("data.prefetch", 2, 0, said="yes, no"),
    "wire int8": of_key("replication.wire", "int8", "none", REPLICAS, ALL_REDUCE, EXACT),
    "compiled passes": of_key(
        "device.passes",
        "compiled",
        "numpy",
        ON_CPU,
        said="yes, no",
        is_on=lambda job: job.config.device.passes == "compiled",
    ),
}
"""Tricks by name, in the order of the table."""


class Counting(Ours):
    """A side of a comparison that reads its own rows, and counts the bytes that it sends."""

    def __init__(self, transport: Transport, job: Job, name: str):
        super().__init__(job, name)
        self._traffic, self.sent, self.steps = transport.traffic, 0, 0
        config = job.trainer.config
        self._source = job.data
        if ahead := config.data.prefetch:
            self._source = Prefetched(job.data, ahead, config.run.steps)

    def step(self, index: int, inputs: Any, targets: Any) -> float:
        before = self._traffic.nbytes
        loss = super().step(index, *self.job.trainer.replica.batch(self._source, index))
        self.sent += self._traffic.nbytes - before
        self.steps += 1
        return loss

    def end(self) -> None:
        """Finish the all-gathers of parameters that the last step started. Collective."""
        before = self._traffic.nbytes
        self.job.trainer.sync_parameters()
        self.sent += self._traffic.nbytes - before
        if isinstance(self._source, Prefetched):
            self._source.close()


def try_all(
    transport: Transport, job: Job, names: Sequence[str], blocks: int, steps: int
) -> Iterator[list[Row]]:
    """Measure a job with and without each trick in turns. Collective.

    For each trick, yield the row without it and the row with it, whose `side` is the trick's name;
    or only one row with the reason why the trick does not apply. The job with a trick is built only
    for its turns, so at most two jobs are in memory.

    blocks  turns of the job with a trick, and of the job without it
    steps   steps in a turn
    """
    resolved = job.trainer.job
    for name in names:
        trick = TRICKS[name]
        is_used, on = trick.is_used(resolved), trick.on(resolved)
        # A job that has the trick in another form keeps that form.
        values = resolved.config.flat()
        lines = settings_of({key: values[key] for key in on} if is_used else on)
        row = Row(name, name, lines, is_used, trick.reason(resolved))
        if row.reason:
            yield [row]
            continue
        changes = settings_of(trick.off if is_used else on)
        try:
            other = build(transport, _changed(transport, job, changes), source=job.source)
        except MpitrainError as error:
            if not error.agreed:
                raise
            yield [row._replace(reason=error.law)]
            continue
        for each in (job, other):
            _count(transport, each)
        without, having = (other, job) if is_used else (job, other)
        sides = [Counting(transport, without, WITHOUT), Counting(transport, having, name)]
        rows = alternate(transport, job, sides, blocks, steps, of=name)
        off, on_row = (_with_bytes(transport, *each) for each in zip(sides, rows, strict=True))
        yield [off, compared(on_row, off)._replace(settings=lines, is_used=is_used)]
        other.close()


def _changed(transport: Transport, job: Job, changes: list[str]) -> Config:
    tables = job.trainer.config.model_dump()
    return on_all_ranks(transport, lambda: parse(with_settings(tables, changes)))


def _count(transport: Transport, job: Job) -> None:
    """Count a step of a job that `build` did not count: it counts only what it checks. Collective."""
    trainer, unlimited = job.trainer, Room(sys.maxsize, 0, (), "")

    def counted() -> StepCounts:
        if trainer.job.counts != StepCounts():
            return trainer.job.counts
        return check_activations(job, unlimited, transport.rank)

    trainer.job = replace(trainer.job, counts=on_all_ranks(transport, counted))


def _with_bytes(transport: Transport, side: Counting, row: Row) -> Row:
    """Return a row with the bytes of memory and of messages. Collective."""
    trainer = side.job.trainer
    side.end()
    # The update of a small model needs more of the arena than its activations do.
    memory = {**trainer.replica.held_by_kind(), "activations": trainer.pipe.peak_bytes}
    measurements = memory, trainer.job.counts.peak, side.sent / side.steps
    memories, counted, sent = zip(*transport.gather_text(measurements), strict=True)
    # A wire format may begin with dense steps, which send more than these steps do.
    settings = trainer.config.replication
    formula = (
        None if settings.exact_steps(trainer.config.run.steps) else predicted(transport, side.job)
    )
    return row._replace(
        memory=[*memories], counted=[*counted], sent_bytes=[*sent], formula_bytes=formula
    )


def settings_of(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={shown(value)}" for key, value in values.items()]


def names_of(text: str | None) -> list[str]:
    """Return the names of tricks in a text with commas; all tricks if there is no text.

    raises  ConfigError for a name that is not in TRICKS
    """
    names = [name.strip() for name in text.split(",")] if text else [*TRICKS]
    for name in names:
        if name not in TRICKS:
            raise ConfigError(
                f"A trick is one of {', '.join(TRICKS)}, but --tricks names {name!r}.",
                "Name some of these, with commas between them.",
            )
    return [*dict.fromkeys(names)]


SAID = TextColumn("said", "<10", lambda row: TRICKS[row.side].said or "-", gap=2)


def summary(rows: Sequence[Row]) -> list[str]:
    """Return lines below the table: how many counted bytes were right, and the tricks that do not apply."""
    having = [row for row in rows if row.speed]
    absent = [row for row in rows if row.reason]
    lines = [""]
    if having:
        unsure = sum(row.speed in UNSURE for row in having)
        lines.append(
            f"ratio: the step with the trick / without it, median of {len(having[0].ratios)} blocks in turns; "
            f"~ {unsure} of {len(having)}: the blocks disagree"
        )
        lines.append(
            "said: faster? and smaller? in HuggingFace's guide to training on one GPU; -: not in it"
        )
        activations, sent = checks(rows)
        lines.append(
            f"activations equal the counted bytes in {activations[0]} of {activations[1]} jobs"
        )
        if sent[1]:
            lines.append(f"sent bytes equal the formula in {sent[0]} of {sent[1]} jobs")
    if absent:
        lines += ["", "Not for this job:", *(f"{row.side}: {row.reason}" for row in absent)]
    return lines


def checks(rows: Sequence[Row]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how many predictions equal the measured bytes, out of how many.

    Two pairs (equal, all): for bytes of activations, and for sent bytes that have a formula.
    """
    sides = [row for row in rows if not row.reason]
    equal = sum([memory["activations"] for memory in side.memory] == side.counted for side in sides)
    known = [side for side in sides if side.formula_bytes is not None]
    right = sum(max(side.sent_bytes) == side.formula_bytes for side in known)
    return (equal, len(sides)), (right, len(known))
