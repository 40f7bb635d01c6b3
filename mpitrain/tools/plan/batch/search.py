"""The search for the batch of a job: counts, runs and times micro-batches, and measures the noise."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mpitrain.config import Config
from mpitrain.data import Source
from mpitrain.errors import ConfigError
from mpitrain.models.table import check_data
from mpitrain.parallel.modes import check_synchronous
from mpitrain.run.build import Job, build, open_data
from mpitrain.run.metrics import strict
from mpitrain.run.resolve import Given, Resolved, resolve
from mpitrain.tools.plan.batch.fitting import Fit, counted_bytes, find_largest, with_rows
from mpitrain.tools.plan.batch.noise import LEAST, Noise, measure
from mpitrain.tools.plan.batch.settings import BatchSetting, critical_size, setting
from mpitrain.tools.plan.batch.timing import Steps, Timed, fastest, sizes, time_sizes
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

PARTS = 16
"""Largest number of small batches in a large one for the noise scale; more cost time and add little."""

TRIES = 16
"""Largest number of builds of a job before it is refused: other processes may take memory meanwhile."""


class SearchResult(NamedTuple):
    """The result of a search, equal on all ranks.

    parameters  of the model
    best        the fastest size; None if other work ran
    counted     {rows of a timed size: bytes of activations in the shared memory}
    noise       None if it was not measured
    present     how to run the configured batch.size, if possible
    critical    how to run the critical batch size, if it is known
    tokens      in a row; 0: rows are samples
    """

    resolved: Resolved
    parameters: int
    fit: Fit
    timed: list[Timed]
    best: Timed | None
    counted: dict[int, int]
    noise: Noise | None
    present: BatchSetting | None
    critical: BatchSetting | None
    tokens: int

    def facts(self) -> dict[str, Any]:
        """Return the estimates as JSON; values that are not finite are None."""
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
        }


def search(
    transport: Transport,
    unresolved: Given,
    most: int,
    seconds: float,
    show: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Search for the batch of a job; collective.

    most     number of rows in the largest micro-batch to try
    seconds  limit of the timed steps, and of the batches for the noise
    show     called with a description of the present work
    raises   ConfigError on every rank, if the smallest micro-batch does not fit
    """
    resolved = resolve(transport, unresolved)
    on_all_ranks(transport, lambda: _check_mode(resolved.config))
    source = open_data(transport, unresolved)
    name = resolved.config.data.source
    on_all_ranks(transport, lambda: check_data(resolved.config.model.kind, source.form, name))
    show("counting")
    fit = find_largest(transport, resolved, source, most)
    count = partial(counted_bytes, transport, source, fit.room)
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
    finally:
        job.close()
    rows = (best or timed[-1]).rows

    def fits(candidate: Resolved) -> bool:
        return fit.room.needed + count(candidate)[0] <= fit.room.free

    def agreed(size: int | None) -> BatchSetting | None:
        """Return the setting of the rank that needs the most micro-batches; collective."""
        every = transport.gather_text(setting(resolved, size, rows, fits) if size else None)
        if not all(every):
            return None
        return max((BatchSetting(*own) for own in every), key=lambda own: own.micro_batches)

    size = resolved.config.batch.size
    return SearchResult(
        resolved,
        parameters,
        fit,
        timed,
        best,
        {each.rows: count(with_rows(resolved, each.rows))[0] for each in timed},
        noise,
        agreed(size),
        agreed(critical_size(resolved, noise, fit.unit)),
        source.shape[0] if source.form == "tokens" else 0,
    )


def _check_mode(config: Config) -> None:
    check_synchronous(config, "plan batch measures")
    if config.replication.mode == "master":
        raise ConfigError(
            "plan batch counts the activations of each rank's rows, but with replication.mode master "
            "rank 0 also has the logits of all rows.",
            "Set replication.mode=all-reduce.",
        )


def _built(transport: Transport, resolved: Resolved, source: Source, fit: Fit) -> tuple[Fit, Job]:
    """Build the job with the largest micro-batch, or a smaller one if memory was taken meanwhile."""
    config = resolved.config
    optimizer = config.optimizer.model_copy(update={"lr": Steps.STILL})
    for _ in range(TRIES):
        changed = with_rows(resolved, fit.rows).config.model_copy(update={"optimizer": optimizer})
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
    resolved: Resolved,
    steps: Steps,
    unit: int,
    timed: list[Timed],
    seconds: float,
    show: Callable[[str], None],
) -> Noise | None:
    """Measure the noise scale, with at least `LEAST` batches in the time if they can be small."""
    affordable = max(2, int(seconds / (2 * LEAST * timed[0].first_s)))
    parts = min(PARTS, affordable, steps.rows // unit)
    if parts < 2 or resolved.wire.name != "none":
        return None
    start = time.perf_counter()

    def is_over() -> bool:
        return transport.gather_text(time.perf_counter() - start)[0] > seconds

    return measure(
        steps, parts * unit, unit, is_over, lambda batches: show(f"gradient noise, batch {batches}")
    )
