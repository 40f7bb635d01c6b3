"""The table of tricks that `plan tricks` tries on a job: their settings, and where they apply."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpitrain.ops.host.attention import TILED_FROM
from mpitrain.run.resolve import Resolved

Settings = Mapping[str, Any]
LARGEST = 4
"""Micro-batches of gradient accumulation, and slices of the logits, at most."""


class Trick(NamedTuple):
    """Entry in the table of tricks.

    on      (job) -> {key: value} with the trick
    off     {key: value} without it
    reason  (job) -> the reason why the trick does not apply; empty: it may
    is_on   (job) -> whether the job has the trick; None: whether it has all values of `on`
    """

    on: Callable[[Resolved], Settings]
    off: Settings
    reason: Callable[[Resolved], str]
    is_on: Callable[[Resolved], bool] | None = None

    def is_used(self, job: Resolved) -> bool:
        if self.is_on:
            return self.is_on(job)
        values = job.config.flat()
        return all(values[key] == value for key, value in self.on(job).items())


def row(on: Settings, off: Settings, *reasons: Callable[[Resolved], str], **more: Any) -> Trick:
    """Return a trick with constant settings and the first of several reasons."""
    return Trick(lambda job: on, off, first_of(*reasons), **more)


def first_of(*reasons: Callable[[Resolved], str]) -> Callable[[Resolved], str]:
    """Return the function that returns the first reason that is not empty."""
    return lambda job: next(filter(None, (reason(job) for reason in reasons)), "")


def unless(holds: Callable[[Resolved], bool], text: str) -> Callable[[Resolved], str]:
    """Return a reason: this text, unless a condition of the trick holds."""
    return lambda job: "" if holds(job) else text


def _replica_rows(job: Resolved) -> int:
    return job.config.batch.size // job.axes.dp


def _at_most(stage: int) -> Callable[[Resolved], str]:
    """Return a reason against this stage of ZeRO if the job already has a higher one."""
    return unless(
        lambda job: job.config.replication.zero <= stage,
        "replication.zero is higher: the job shards more already",
    )


REPLICAS = unless(lambda job: job.axes.dp > 1, "there is one replica")
ALL_REDUCE = unless(
    lambda job: job.config.replication.mode == "all-reduce", "replication.mode is not all-reduce"
)
ON_CPU = unless(lambda job: job.config.device.kind == "cpu", "device.kind is not cpu")
GPT = unless(lambda job: job.config.model.kind == "gpt", "model.kind is not gpt")

TRICKS: dict[str, Trick] = {
    "mixed precision": row(
        {"precision.compute": "bfloat16"},
        {"precision.compute": "float32"},
        unless(lambda job: job.config.precision.compute != "float64", "the job is in float64"),
        is_on=lambda job: job.config.precision.is_half,
    ),
    "gradient accumulation": Trick(
        lambda job: {"batch.micro_batches": min(LARGEST, _replica_rows(job))},
        {"batch.micro_batches": 1},
        first_of(
            unless(lambda job: job.axes.pp == 1, "a pipeline needs its micro-batches"),
            unless(lambda job: _replica_rows(job) > 1, "a replica has one row a step"),
        ),
        lambda job: job.config.batch.micro_batches > 1,
    ),
    "recomputation": row(
        {"memory.recompute": "unit"},
        {"memory.recompute": "none"},
        is_on=lambda job: job.config.memory.recompute != "none",
    ),
    "attention in tiles": row(
        {"memory.attention": "tiled"},
        {"memory.attention": "whole"},
        GPT,
        ON_CPU,
        is_on=lambda job: (
            job.config.memory.attention == "tiled"
            or (job.config.memory.attention == "auto" and job.config.model.context >= TILED_FROM)
        ),
    ),
    "logits in slices": row(
        {"memory.logit_chunks": LARGEST},
        {"memory.logit_chunks": 1},
        is_on=lambda job: job.config.memory.logit_chunks > 1,
    ),
    **{
        f"ZeRO {stage}": row(
            {"replication.zero": stage},
            {"replication.zero": 0},
            REPLICAS,
            ALL_REDUCE,
            _at_most(stage),
        )
        for stage in (1, 2, 3)
    },
    "sequence parallelism": row(
        {"layout.sequence_parallel": True},
        {"layout.sequence_parallel": False},
        unless(lambda job: job.axes.tp > 1, "layout.tp is 1"),
    ),
    "LoRA": row(
        {"lora.rank": 8},
        {"lora.rank": 0},
        GPT,
        is_on=lambda job: job.config.lora.rank > 0,
    ),
    "8-bit optimizer": row(
        {"optimizer.name": "adamw8bit"},
        {"optimizer.name": "adamw"},
        unless(
            lambda job: job.config.optimizer.name in ("adamw", "adamw8bit"),
            "optimizer.name is not adamw",
        ),
    ),
    "overlap": row(
        {"replication.overlap": True},
        {"replication.overlap": False},
        REPLICAS,
        ALL_REDUCE,
    ),
    "prefetch": row(
        {"data.prefetch": 2},
        {"data.prefetch": 0},
        is_on=lambda job: job.config.data.prefetch > 0,
    ),
    "wire int8": row(
        {"replication.wire": "int8"},
        {"replication.wire": "none"},
        REPLICAS,
        ALL_REDUCE,
        unless(
            lambda job: job.config.replication.wire in ("none", "int8"),
            "replication.wire is another format",
        ),
    ),
    "compiled passes": row(
        {"device.passes": "compiled"},
        {"device.passes": "numpy"},
        ON_CPU,
    ),
}
"""Tricks by name, in the order of the table."""
