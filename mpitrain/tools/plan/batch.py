"""`plan batch`: the largest and the fastest micro-batch of a job, and the critical batch size.

Whether a micro-batch fits into memory is counted first, then tried. R rows of a micro-batch, dp
replicas and m micro-batches of a step make a global batch of R dp m rows.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpitrain.config import Config
from mpitrain.data import Source
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.models.table import MODELS, other_form
from mpitrain.ops.device import Device
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.run.build import build, check_memory, open_data
from mpitrain.run.count.step import bytes_needed
from mpitrain.run.job import Job, Room, sequences_of
from mpitrain.run.metrics import strict
from mpitrain.run.rules import check_each, of_common_steps
from mpitrain.tools.plan.micro_batches import StepPredictions, counts, measured_predictions
from mpitrain.tools.plan.micro_batches import report as step_report
from mpitrain.tools.plan.steps import (
    LEAST,
    Noise,
    Steps,
    Timed,
    fastest,
    measure_noise,
    sizes,
    time_sizes,
)
from mpitrain.tools.text_table import TextColumn, TextTable, marked
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

PARTS = 16
"""For the noise scale: largest number of small batches in a large one; more cost time and add little."""

TRIES = 16
"""Largest number of builds of a job before it is refused: other processes may take memory meanwhile."""


class BatchSetting(NamedTuple):
    """A setting of the batch.

    size           rows of the global batch
    micro_batches  their number in a step
    rows           of the largest micro-batch
    """

    size: int
    micro_batches: int
    rows: int

    @property
    def keys(self) -> str:
        return f"--set batch.size={self.size} --set batch.micro_batches={self.micro_batches}"


class Fit(NamedTuple):
    """The micro-batches of a job that fit into memory.

    unit     rows of the smallest micro-batch; the rows of all others are multiples
    rows     rows of the largest micro-batch that fits
    is_most  whether the search ended there, so that larger ones may fit
    room     memory of this host or GPU before the job is built
    counted  bytes of activations in that memory, for a micro-batch of `rows` rows
    """

    unit: int
    rows: int
    is_most: bool
    room: Room
    counted: int


class SearchResult(NamedTuple):
    """What `search` finds, equal on all ranks.

    source      the data of the job
    parameters  number of parameters of the model
    best        the micro-batch with the most rows per second; None if other work disturbed the
                times
    counted     {rows of a timed micro-batch: bytes of activations in the shared memory}
    noise       gradient noise scale; None if it was not measured
    present     setting for the configured batch.size; None if none fits
    critical    setting for the critical batch size; None if this is not known or none fits
    step        of a pipeline: predictions for each number of micro-batches; None without a choice
    """

    resolved: Job
    source: Source
    parameters: int
    fit: Fit
    timed: list[Timed]
    best: Timed | None
    counted: dict[int, int]
    noise: Noise | None
    present: BatchSetting | None
    critical: BatchSetting | None
    step: StepPredictions | None

    def facts(self) -> dict[str, Any]:
        noise = strict(self.noise._asdict()) if self.noise else None
        return {
            "most_rows": self.fit.rows,
            "is_most": self.fit.is_most,
            "free_bytes": self.fit.room.free,
            "state_bytes": int(self.fit.room.needed),
            "counted_bytes": list(self.counted.values()),
            "fastest": self.best.rows if self.best else None,
            "noise": noise,
            "present": self.present and self.present._asdict(),
            "critical": self.critical and self.critical._asdict(),
            "micro_batches": self.step and [each._asdict() for each in self.step.predicted],
        }


def search(
    transport: Transport,
    resolved: Job,
    most: int,
    seconds: float,
    show: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Search for the batch of a job. Collective.

    most     rows of the largest micro-batch to try
    seconds  time limit of the timed steps, and again of the batches for the noise scale
    show     called with a description of the work that begins
    raises   ConfigError on every rank, if the smallest micro-batch does not fit
    """
    on_all_ranks(transport, lambda: _check_mode(resolved.config))
    source = open_data(transport, resolved)
    keys = resolved.config.model
    if source.form not in MODELS[keys.kind].takes.split():  # the same on all ranks
        raise other_form(keys.kind, source.form, resolved.config.data.source).on_every_rank()
    show("counting")
    fit = find_largest(transport, resolved, source, most)
    room = fit.room
    fit, job = _built(transport, resolved, source, fit)
    try:
        steps = Steps(job, fit.rows)
        timed = time_sizes(
            steps,
            sizes(fit.unit, fit.rows),
            seconds,
            transport.gather_text,
            lambda rows: show(f"a step of {rows} rows"),
        )
        best = fastest(timed)
        noise = _noise(transport, resolved, steps, fit.unit, timed, seconds, show)
        parameters = job.trainer.parameter_count
        choices = _choices(resolved, fit.rows)
        show("stages of the pipeline")
        step = measured_predictions(job, resolved, choices) if choices else None
    finally:
        job.close()
    rows = (best or timed[-1]).rows

    def count(candidate: Job) -> int:
        return counted_bytes(transport, room, replace(candidate, source=source))[0]

    def fits(candidate: Job) -> bool:
        return room.needed + count(candidate) <= room.free

    def agreed(size: int | None) -> BatchSetting | None:
        """Return the setting of the rank that needs the most micro-batches. Collective."""
        every = transport.gather_text(setting(resolved, size, rows, fits) if size else None)
        if not all(every):
            return None
        return max((BatchSetting(*own) for own in every), key=lambda own: own.micro_batches)

    size = resolved.config.batch.size
    return SearchResult(
        resolved,
        source,
        parameters,
        fit,
        timed,
        best,
        {each.rows: count(with_rows(resolved, each.rows)) for each in timed},
        noise,
        agreed(size),
        agreed(critical_size(resolved, noise, fit.unit)),
        step,
    )


def _choices(resolved: Job, most: int) -> list[int]:
    """Return the possible numbers of micro-batches of a pipeline; empty without a choice.

    most  largest number of rows in a micro-batch
    """
    config, stages = resolved.config, resolved.axes.pp
    rows = config.batch.size // resolved.axes.dp
    if stages == 1 or config.pipeline.schedule not in SCHEDULES or rows < stages:
        return []
    return [count for count in counts(config, stages, rows) if -(-rows // count) <= most]


def _check_mode(config: Config) -> None:
    check_each(of_common_steps(config, True, "plan batch measures"))
    if config.replication.mode == "master":
        raise ConfigError(
            "plan batch counts the activations of each rank's rows, but with replication.mode master "
            "rank 0 also has the logits of all rows.",
            "Set replication.mode=all-reduce.",
        )


def _built(transport: Transport, resolved: Job, source: Source, fit: Fit) -> tuple[Fit, Job]:
    for _ in range(TRIES):
        changed = with_rows(resolved, fit.rows).config.changed({"optimizer.lr": Steps.STILL})
        try:
            return fit, build(transport, changed, source=source)
        except ConfigError:
            smaller = fit.rows * 15 // 16 // fit.unit * fit.unit
            if not smaller:
                raise
            fit = fit._replace(rows=smaller, is_most=False)
    raise AssertionError("a job with few rows was neither built nor refused")


def _noise(
    transport: Transport,
    resolved: Job,
    steps: Steps,
    unit: int,
    timed: list[Timed],
    seconds: float,
    show: Callable[[str], None],
) -> Noise | None:
    affordable = max(2, int(seconds / (2 * LEAST * timed[0].first_s)))
    parts = min(PARTS, affordable, steps.rows // unit)
    if parts < 2 or resolved.config.replication.wire != "none":
        return None
    start = time.perf_counter()

    def is_over() -> bool:
        return transport.gather_text(time.perf_counter() - start)[0] > seconds

    return measure_noise(
        steps, parts * unit, unit, is_over, lambda batches: show(f"gradient noise, batch {batches}")
    )


def with_rows(resolved: Job, rows: int) -> Job:
    """Return the job with `rows` rows in each of its micro-batches, whose number stays."""
    count = resolved.plan.micro_batches
    size = rows * resolved.axes.dp * count
    values = {"batch.size": size, "batch.micro_batches": count}
    return replace(resolved, config=resolved.config.changed(values))


def find_largest(transport: Transport, resolved: Job, source: Source, most: int) -> Fit:
    """Return the largest micro-batch that fits on all ranks, of at most `most` rows. Collective.

    raises  ConfigError on every rank, if the smallest micro-batch does not fit
    """
    device, unit = resolved.device, sequences_of(resolved.config)
    resolved = replace(resolved, source=source)
    room = on_all_ranks(
        transport, lambda: check_memory(transport, resolved, resolved.described().model)
    )

    def count(rows: int) -> tuple[int, int]:
        return counted_bytes(transport, room, with_rows(resolved, rows))

    def own() -> int:
        largest = largest_multiple(
            lambda rows: room.needed + count(rows)[0] <= room.free, unit, most
        )
        if largest:
            return largest
        raise ConfigError(
            f"{len(room.ranks)} rank(s) need {count(unit)[0] / 1e6:,.1f} MB for the activations of "
            f"{unit} row(s) in a micro-batch, but {(room.free - room.needed) / 1e6:,.1f} MB "
            f"of the {room.free / 1e6:,.1f} MB that {room.allowed} remain {room.where}.",
            "Set memory.recompute=unit, or lower model.width or model.context.",
        )

    counted = min(transport.gather_text(on_all_ranks(transport, own)))
    state = int(room.needed / len(room.ranks))
    rows = largest_multiple(
        lambda rows: can_allocate(transport, device, state + count(rows)[1]), unit, counted
    )
    if not rows:
        raise ConfigError(
            f"{unit} row(s) in a micro-batch fit by count, but a rank ran out of memory in a trial allocation.",
            "Set memory.limit_gb to the memory that this job really has.",
        )
    return Fit(unit, rows, rows + unit > most, room, count(rows)[0])


def counted_bytes(transport: Transport, room: Room, job: Job) -> tuple[int, int]:
    """Count the bytes of activations in a step. No message is sent.

    returns  the bytes of all ranks that share this rank's memory, and the bytes of this rank
    raises   ConfigError if an operation of a plugin cannot be counted
    """
    try:
        nbytes, step = bytes_needed(job, room, transport.rank)
    except MpitrainError:
        raise
    except Exception as error:  # A plugin's layer may use an array in a way that needs memory.
        raise ConfigError(
            f"plan batch counts activations, but a step of this job cannot be counted: {type(error).__name__}: {error}.",
            "Let the operations of your plugin ask has_memory of mpitrain.machine.backend.",
        ) from None
    return nbytes, step.peak


def can_allocate(transport: Transport, device: Device, nbytes: int) -> bool:
    """Return whether every rank can allocate and write `nbytes` bytes at the same time. Collective.

    If one rank runs out of memory, all ranks return False. No message has to be cancelled then, as
    it would in a step, because a trial allocation sends none.
    """
    array = None
    try:
        array = device.arena().take((max(1, nbytes),), np.uint8)
        array.fill(0)
        device.backend.synchronize()
    except (MemoryError, OSError):
        return all(transport.gather_text(False))
    # All ranks hold their memory at the same time, as in a step.
    return all(transport.gather_text(array is not None))


def largest_multiple(fits: Callable[[int], bool], unit: int, most: int) -> int:
    """Return the largest multiple of `unit` up to `most` that fits, by bisection; 0 if none fits.

    fits  (rows) -> whether they fit. If a number of rows does not fit, no larger number does
    """
    low, high = 0, most // unit
    step = 1
    while low < high:
        # Doubling finds small answers without counting large ones.
        middle = min(high, low + step) if step else (low + high + 1) // 2
        if fits(middle * unit):
            low, step = middle, 2 * step
        else:
            high, step = middle - 1, 0
    return low * unit


def setting(
    resolved: Job, size: int, rows: int, fits: Callable[[Job], bool]
) -> BatchSetting | None:
    """Return the setting with the fewest micro-batches that fits; None if none fits. No message is sent.

    size  rows of the global batch
    rows  largest number of rows in a micro-batch
    fits  whether the memory suffices for a job
    """
    own = -(-size // resolved.axes.dp)
    job = replace(resolved, config=resolved.config.changed({"batch.size": size}))
    for count in range(max(1, -(-own // rows)), size // resolved.axes.dp + 1):
        candidate = job.with_micro_batches(count)
        if candidate and fits(candidate):
            return BatchSetting(size, count, -(-own // count))
    return None


def critical_size(resolved: Job, noise: Noise | None, unit: int) -> int | None:
    """Return the global batch nearest to the gradient noise scale; None if that is not known.

    unit  the rows of a micro-batch are a multiple of it
    """
    if noise is None or noise.is_uncertain:
        return None
    step = resolved.axes.dp * unit
    return max(1, round(noise.rows / step)) * step


def report(result: SearchResult) -> Iterator[str]:
    config, axes, room = result.resolved.config, result.resolved.axes, result.fit.room
    yield (
        f"{config.model.kind}, {result.parameters:,} parameters; {axes.product}, "
        f"{result.resolved.plan.micro_batches} micro-batch(es) in a step, {config.device.kind}"
    )
    yield (
        f"{room.free / 1e6:,.1f} MB {room.allowed} {room.where}; {len(room.ranks)} rank(s) need "
        f"{room.needed / 1e6:,.1f} MB for parameters, gradients and optimizer state"
    )
    yield ""
    yield from TextTable(
        [
            TextColumn("rows", "6", "rows"),
            TextColumn("batch", "7", "size"),
            TextColumn("counted MB", "11.2f", lambda each: result.counted[each.rows] / 1e6),
            TextColumn("step ms", "10.2f", lambda each: 1e3 * each.step_s),
            TextColumn("", "1", lambda each: marked("", each.blocks and each.is_spoilt), gap=0),
            TextColumn("rows/s", "10.1f", "rows_per_s", gap=0),
            TextColumn("blocks, ms", "<", partial(_blocks, result), gap=3),
        ]
    ).lines(result.timed)
    yield ""
    yield _largest(result)
    if result.best is None:
        yield "No size is named the fastest: other work ran (~). Repeat the command."
    tokens = result.source.shape[0] if result.source.form == "tokens" else 0
    yield from _noise_lines(result.noise, tokens)
    yield from _keys(result)
    if result.step:
        yield ""
        yield from step_report(result.resolved, result.step, result.parameters)


def _blocks(result: SearchResult, each: Timed) -> str:
    text = "one step, not timed"
    if each.blocks:
        text = f"{1e3 * min(each.blocks):.2f} .. {1e3 * max(each.blocks):.2f}"
    text += "  <- fastest" if each is result.best else ""
    is_largest = each.rows == result.fit.rows and not result.fit.is_most
    return text + ("  <- largest that fits" if is_largest else "")


def _largest(result: SearchResult) -> str:
    fit = result.fit
    did_run = any(each.rows == fit.rows for each in result.timed)
    proof = "a step ran" if did_run else "counted alone: --seconds is too short for a step"
    if fit.is_most:
        return f"Micro-batches of {fit.rows} rows fit ({proof}); --most looks no further."
    return (
        f"The largest micro-batch has {fit.rows} rows ({proof}); {fit.rows + fit.unit} do not fit."
    )


def _noise_lines(noise: Noise | None, tokens: int) -> Iterator[str]:
    if noise is None:
        yield (
            "No gradient noise scale: it needs finite gradients of two batch sizes, and "
            "replication.wire=none."
        )
        return
    of = f"{noise.batches} batches of {noise.large} rows, each also in batches of {noise.small}"
    if not math.isfinite(noise.rows):
        yield f"The noise hides the gradient in {of}: raise --seconds."
        return
    mark = "~" if noise.is_uncertain else ""
    text = f" ({noise.rows * tokens:,.0f} tokens)" if tokens else ""
    yield (
        f"Gradient noise scale (McCandlish et al. 2018): {mark}{noise.rows:,.1f} rows{text}, "
        f"standard error {noise.error:,.1f}"
    )
    yield f"  from {of}"


def _keys(result: SearchResult) -> Iterator[str]:
    size, noise = result.resolved.config.batch.size, result.noise
    present, critical = result.present, result.critical
    yield ""
    if noise and critical:
        yield (
            f"At these parameters batch.size {size} needs {noise.samples_factor(size):.2f} times the fewest rows "
            f"and {noise.steps_factor(size):.2f} times the fewest steps;"
        )
        yield f"the critical size {critical.size} needs about 2 times each."
        if not result.resolved.config.run.init_from:
            yield "They are the initial ones, and noise grows in training: set run.init_from=RUN to measure a later model."
    if present:
        yield f"same results:   {present.keys}   ({present.rows} rows in a micro-batch)"
    else:
        yield f"No number of micro-batches makes batch.size {size} fit."
    if critical and critical.size != size:
        yield f"critical size:  {critical.keys}   ({critical.rows} rows in a micro-batch)"
