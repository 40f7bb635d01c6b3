"""A job with and without each trick, measured in turns: is it faster, is it smaller?"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from mpitrain.config import Config, with_settings
from mpitrain.data.prefetch import Prefetched
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.run.build import Job, build
from mpitrain.run.choices import parse
from mpitrain.tools.bench.comparison.formulas import predicted
from mpitrain.tools.bench.comparison.trick_rows import TRICKS, Trick
from mpitrain.tools.bench.training.steps import Ours, alternate
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

READING = "data.prefetch"
"""The key of a trick that changes how batches are read, and nothing of a step."""


class TrickSide(NamedTuple):
    """The measurements of the job with or without a trick.

    blocks   median seconds per step of each block, on the slowest rank
    memory   by rank: bytes of parameters, gradients, state, scratch and activations
    counted  by rank: bytes of activations, counted before the first step
    sent     by rank: payload of messages per step
    formula  bytes that the busiest rank sends per step by formula; None without a formula
    """

    blocks: list[float]
    memory: list[dict[str, int]]
    counted: list[int]
    sent: list[float]
    formula: float | None

    @property
    def nbytes(self) -> int:
        """The bytes of the fullest rank."""
        return max(sum(each.values()) for each in self.memory)


class Tried(NamedTuple):
    """A trick on a job.

    settings  the lines to set, as section.key=value
    is_used   whether the job has the trick already
    reason    why the trick does not apply; empty: it was measured
    """

    name: str
    settings: list[str]
    is_used: bool
    reason: str = ""
    on: TrickSide | None = None
    off: TrickSide | None = None

    @property
    def ratios(self) -> list[float]:
        """How many times as fast the job is with the trick, in each block."""
        assert self.on and self.off
        return [off / on for on, off in zip(self.on.blocks, self.off.blocks, strict=True)]

    @property
    def speed(self) -> str:
        """`faster`, `slower`, or ~ if the blocks disagree."""
        ratios = self.ratios
        if all(ratio > 1 for ratio in ratios):
            return "faster"
        return "slower" if all(ratio < 1 for ratio in ratios) else "~"

    @property
    def smaller(self) -> float:
        """The memory with the trick, relative to the memory without."""
        assert self.on and self.off
        return self.on.nbytes / max(1, self.off.nbytes)


class Counting(Ours):
    """A side that counts its steps and the bytes that this rank sends in them."""

    def __init__(self, transport: Transport, job: Job, name: str):
        super().__init__(job, name)
        self._traffic, self.sent, self.steps = transport.traffic, 0, 0

    def step(self, index: int, inputs: Any, targets: Any) -> float:
        before = self._traffic.nbytes
        loss = super().step(index, inputs, targets)
        self.sent += self._traffic.nbytes - before
        self.steps += 1
        return loss

    def sync(self) -> None:
        """End the gathers of parameters that the last step has begun; collective."""
        before = self._traffic.nbytes
        self.job.trainer.sync_parameters()
        self.sent += self._traffic.nbytes - before


class ReadingSide(Counting):
    """A side that also reads the batch of each step, ahead or not."""

    def __init__(self, transport: Transport, job: Job, name: str, ahead: int):
        super().__init__(transport, job, name)
        steps = job.trainer.config.run.steps
        self.prefetched = Prefetched(job.data, ahead, steps) if ahead else None

    def step(self, index: int, inputs: Any, targets: Any) -> float:
        source = self.prefetched or self.job.data
        return super().step(index, *self.job.trainer.replication.rows.batch(source, index))


def try_all(
    transport: Transport,
    job: Job,
    names: Sequence[str],
    blocks: int,
    steps: int,
) -> Iterator[Tried]:
    """Measure a job with and without each trick in turns, and yield the tricks. Collective.

    Each trick is built only for its turns, so that at most two jobs are in memory.

    blocks  turns of each side
    steps   steps of a turn
    """
    resolved = job.trainer.resolved
    for name in names:
        trick = TRICKS[name]
        is_used, on = trick.is_used(resolved), trick.on(resolved)
        # A job that has the trick in another form keeps that form.
        values = resolved.config.flat()
        lines = settings_of({key: values[key] for key in on} if is_used else on)
        tried = Tried(name, lines, is_used, trick.reason(resolved))
        if tried.reason:
            yield tried
            continue
        changes = settings_of(trick.off if is_used else on)
        if READING in on:
            yield _read(transport, job, tried, trick, blocks, steps)
            continue
        try:
            other = build(transport, _changed(transport, job, changes), source=job.source)
        except MpitrainError as error:
            if not error.agreed:
                raise
            yield tried._replace(reason=error.law)
            continue
        sides = [Counting(transport, each, name) for each in (job, other)]
        yield _tried(transport, tried, sides, blocks, steps)
        other.close()


def _changed(transport: Transport, job: Job, changes: list[str]) -> Config:
    """Return the configuration of a job with some settings; collective."""
    tables = job.trainer.config.model_dump()
    return on_all_ranks(transport, lambda: parse(with_settings(tables, changes)))


def _read(
    transport: Transport, job: Job, tried: Tried, trick: Trick, blocks: int, steps: int
) -> Tried:
    """Measure steps that read their batches, without and with prefetching. Collective."""
    ahead = max(job.trainer.config.data.prefetch, trick.on(job.trainer.resolved)[READING])
    plain, reader = (ReadingSide(transport, job, tried.name, number) for number in (0, ahead))
    assert reader.prefetched
    with closing(reader.prefetched):
        sides = [reader, plain] if tried.is_used else [plain, reader]
        return _tried(transport, tried, sides, blocks, steps)


def _tried(
    transport: Transport, tried: Tried, sides: Sequence[Counting], blocks: int, steps: int
) -> Tried:
    """Measure the job, and the job with the trick or without. Collective."""
    results = alternate(transport, sides[0].job, sides, blocks, steps)
    measured = [
        _side(transport, side, result.blocks) for side, result in zip(sides, results, strict=True)
    ]
    on, off = measured if tried.is_used else reversed(measured)
    return tried._replace(on=on, off=off)


def _side(transport: Transport, side: Counting, blocks: list[float]) -> TrickSide:
    """Gather the measurements of a side. Collective."""
    trainer = side.job.trainer
    side.sync()
    # The update of a small model needs more of the arena than its activations do.
    memory = {**trainer.replication.held_by_kind(), "activations": trainer.pipe.peak_bytes}
    measurements = memory, trainer.counted.peak, side.sent / side.steps
    memories, counted, sent = zip(*transport.gather_text(measurements), strict=True)
    # A wire format may begin with dense steps, which send more than these steps do.
    formula = None if trainer.config.dense_steps else predicted(transport, side.job)
    return TrickSide(blocks, [*memories], [*counted], [*sent], formula)


def settings_of(values: Mapping[str, Any]) -> list[str]:
    """Return the settings as TOML, section.key=value."""
    return [f"{key}={_toml(value)}" for key, value in values.items()]


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def names_of(text: str | None) -> list[str]:
    """Return the names of tricks in a list with commas; all if there is none.

    raises  ConfigError for a name that is not in the table
    """
    names = [name.strip() for name in text.split(",")] if text else [*TRICKS]
    for name in names:
        if name not in TRICKS:
            raise ConfigError(
                f"A trick is one of {', '.join(TRICKS)}, but --tricks names {name!r}.",
                "Name some of these, with commas between them.",
            )
    return [*dict.fromkeys(names)]
