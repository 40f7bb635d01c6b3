"""One training job under several modes of replication: time, traffic, memory and loss of each."""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from mpitrain.bench.plot_loss import draw
from mpitrain.collectives.selection.table import choices
from mpitrain.config import Config, with_settings
from mpitrain.config.plugins import load
from mpitrain.errors import ConfigError
from mpitrain.optim import RULES, checked
from mpitrain.optim.rule import TensorWise
from mpitrain.parallel.grid import axes, divisor
from mpitrain.parallel.modes import MODES, mode_of, servers_of
from mpitrain.parallel.replication.records import StepResult
from mpitrain.parallel.traffic import LETTERS, Formula, Sample
from mpitrain.run.build import Job, build
from mpitrain.run.choices import parse
from mpitrain.run.watchdog import Watchdog
from mpitrain.transport.base import Transport

WARM_UP = 1
"""Steps that are not timed: the first one allocates buffers."""

RING = "replication.algorithm=ring"


def settings_by_mode() -> dict[str, tuple[str, ...]]:
    """Return {mode of --modes: its settings}.

    Modes that are not all-reduce algorithms use a ring for their sums: the transport counts its
    bytes.
    """
    sharded = {stage for mode in MODES.values() for stage in mode.stages}
    return {
        **{name: (f"replication.algorithm={name}",) for name in choices("allreduce")},
        **{
            f"zero{stage}{end}": (f"replication.zero={stage}", f"replication.shard={shard}", RING)
            for end, shard in (("", "all"), ("-host", "host"))
            for stage in sorted(sharded)
        },
        **{
            name: (f"replication.mode={name}", RING)
            for name, mode in MODES.items()
            if not mode.stages and not mode.variants
        },
        **{
            f"{name}-{end}": (f"replication.mode={name}", setting, RING)
            for name, mode in MODES.items()
            for end, setting in mode.variants.items()
        },
    }


def usual() -> list[str]:
    """Return the default of --modes.

    On one host, a `-host` mode equals the mode without the suffix.
    """
    others = (mode for mode in settings_by_mode() if mode not in choices("allreduce"))
    return ["star", "ring", "auto", *(mode for mode in others if not mode.endswith("-host"))]


class Row(NamedTuple):
    """The measurements of one mode.

    workers        ranks that compute gradients
    step_s         mean seconds of a step after WARM_UP on the slowest rank; a mean, because
                   asynchronous servers report several steps at once
    comm_s         mean seconds per step that a worker waits for messages, on the worst worker
    sent_bytes     by rank: payload of messages per step, mean over all steps
    formula_bytes  the same by formula, for the busiest rank; None without a formula
    held_bytes     by rank: parameters, gradients, optimizer state and scratch of reductions
    staleness      most updates between the pull of parameters and the update by their gradient;
                   0 in synchronous modes
    lead           most steps that a worker was ahead of the slowest one; 0 in synchronous modes
    curve          (seconds since the start, training loss) after each step on rank 0
    evaluated_s    seconds from the start to the end of the evaluation
    """

    mode: str
    workers: int
    step_s: float
    samples_per_s: float
    comm_s: float
    sent_bytes: list[float]
    formula_bytes: float | None
    held_bytes: list[int]
    staleness: int
    lead: int
    val_loss: float
    curve: list[tuple[float, float | None]]
    evaluated_s: float


def jobs(words: Sequence[str], settings: Sequence[str], hosts: Sequence[str]) -> dict[str, Config]:
    """Return the configuration of each mode. Local.

    settings  section.key=value for all modes; a mode's own settings take precedence
    hosts     host of every rank, by rank
    raises    ConfigError if a mode does not exist or cannot run on these ranks, or if a plugin
              cannot be imported
    """
    if len(hosts) == 1:
        raise ConfigError(
            "compare measures what ranks send each other, and one rank sends nothing.",
            "mpitrain launch -n 2 -- compare",
        )
    load(with_settings({}, [*settings]))  # Plugins add modes.
    known = settings_by_mode()
    found, refused = {}, {}
    for word in words:
        if word not in known:
            raise ConfigError(
                f"A mode is one of {', '.join(known)}, but --modes names {word!r}.",
                "Name some of these.",
            )
        try:
            found[word] = _job([*settings, *known[word]], hosts)
        except ConfigError as error:
            refused[word] = error
    for word, refusal in refused.items():
        if not found:
            raise refusal
        raise ConfigError(
            f"Mode {word}: {refusal.law}",
            f"{refusal.way_out}\nOr compare what works: --modes {','.join(found)}",
        )
    return found


def _job(settings: list[str], hosts: Sequence[str]) -> Config:
    config = parse(with_settings({}, settings))
    if config.run.steps <= WARM_UP:
        raise ConfigError(
            f"compare needs more than {WARM_UP} step, whose time does not count, but run.steps is "
            f"{config.run.steps}.",
            "Leave run.steps to --steps.",
        )
    config = checked(config)
    divisor(axes(config, len(hosts), servers_of(config)), hosts, config.replication.shard)
    return config


def compare(
    transport: Transport, jobs: dict[str, Config], stepped: Callable[[str, float], None]
) -> Iterator[Row]:
    """Train and evaluate each job, one after the other, all with one data source. Collective.

    stepped  called with the mode and the loss after every step of this rank
    """
    source = None
    for word, config in jobs.items():
        with closing(
            Watchdog(transport.rank, config.run.stall_seconds, transport.traffic)
        ) as watchdog:
            watchdog.alive(f"building {word}")
            job = build(transport, config, source=source)
            source = job.source
            row = _measured(transport, job, word, watchdog, stepped)
            watchdog.alive(f"closing {word}")
            job.close()  # it is collective, so it is not called after an error
        yield row


def _measured(
    transport: Transport,
    job: Job,
    word: str,
    watchdog: Watchdog,
    stepped: Callable[[str, float], None],
) -> Row:
    trainer, sent = job.trainer, transport.traffic.nbytes
    transport.barrier()
    began = time.perf_counter()
    outcomes, ends = [], []
    for outcome in _trained(job, lambda step: watchdog.alive(f"step {step} of {word}")):
        outcomes.append(outcome)
        ends.append(time.perf_counter() - began)
        stepped(word, outcome.loss)
    trainer.sync_parameters()
    sent = transport.traffic.nbytes - sent
    watchdog.alive(f"the evaluation of {word}")
    evaluated = trainer.evaluate(job.data)
    assert evaluated is not None
    times = [end - start for start, end in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
    waits = [outcome.comm_s for outcome in outcomes[WARM_UP:]]
    # Every rank has the same values of staleness and lead.
    latest = (
        max(outcome.staleness for outcome in outcomes),
        max(outcome.lead for outcome in outcomes),
    )
    mine = mean(times), mean(waits), sent / len(outcomes), trainer.replication.held()
    step_s, comm_s, sent_bytes, held_bytes = zip(*transport.gather_text(mine), strict=True)
    lie = trainer.grid.axes
    workers = lie.ranks - lie.servers
    return Row(
        word,
        workers,
        max(step_s),
        trainer.config.batch.size / max(step_s),
        max(comm_s[:workers]),
        [*sent_bytes],
        predicted(job),
        [*held_bytes],
        *latest,
        evaluated[0],
        [(end, finite(outcome.loss)) for end, outcome in zip(ends, outcomes, strict=True)],
        time.perf_counter() - began,
    )


def formula_of(word: str) -> Formula | None:
    """Return the formula of a mode of --modes, or None."""
    config = parse(with_settings({}, [*settings_by_mode()[word]]))
    return mode_of(config).traffic(config.replication)


def predicted(job: Job) -> float | None:
    """Return the bytes that the busiest rank of a job sends per step by formula, or None."""
    trainer, data = job.trainer, job.data
    config, axes = trainer.config, trainer.grid.axes
    formula = mode_of(config).traffic(config.replication)
    if formula is None or config.replication.wire != "none" or axes.tp > 1 or axes.pp > 1:
        return None
    # No formula counts the sums over divided tensors, nor the matrices of Muon.
    if config.replication.zero and isinstance(RULES[config.optimizer.name].step, TensorWise):
        return None
    inputs, targets = data.batch(config.run.seed, 0, config.batch.size, range(1))
    sample = Sample(inputs.nbytes, targets.nbytes, targets.size * data.classes)
    return formula.of(trainer.replication.replica, sample)


def _trained(job: Job, alive: Callable[[int], None]) -> Iterator[StepResult]:
    """Train a job, and yield the result of every step when it is complete. Collective."""
    trainer, replication = job.trainer, job.trainer.replication
    for index in range(trainer.config.run.steps):
        alive(index + 1)
        own = None
        for number in replication.steps(index, lambda: False):
            own = trainer.step(number, *replication.batch(job.data, number))
        yield replication.outcome(index, own)


def finite(loss: float) -> float | None:
    """Return the loss, or None if it is not finite."""
    return loss if math.isfinite(loss) else None


COLUMNS = (
    "mode",
    "workers",
    "step ms",
    "samples/s",
    "exposed ms",
    "sent bytes",
    "by formula",
    "held MB",
    "stale",
    "val loss",
)
WIDTHS = (18, 7, 9, 9, 10, 13, 13, 8, 5, 8)


def heading() -> str:
    """Return the line of column names."""
    return _aligned(COLUMNS)


def line(row: Row) -> str:
    """Format a row of the table: bytes of the busiest rank, memory of the fullest rank."""
    formula = "-" if row.formula_bytes is None else f"{row.formula_bytes:,.0f}"
    return _aligned(
        (
            row.mode,
            str(row.workers),
            f"{1e3 * row.step_s:.1f}",
            f"{row.samples_per_s:.1f}",
            f"{1e3 * row.comm_s:.1f}",
            f"{max(row.sent_bytes):,.0f}",
            formula,
            f"{1e-6 * max(row.held_bytes):.1f}",
            str(row.staleness or "-"),
            f"{row.val_loss:.4f}",
        )
    )


def _aligned(cells: Sequence[str]) -> str:
    first, *others = (
        f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
        for i, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    )
    return " ".join([first, *others])


def footer(rows: Sequence[Row]) -> list[str]:
    """Return the formulas of these modes in words, and the meaning of their letters."""
    said = {
        row.mode: formula.words
        for row in rows
        if row.formula_bytes is not None and (formula := formula_of(row.mode))
    }
    used = set(re.findall(r"n'|\b(?:lg|[A-Zhmns])\b(?!')", " ".join(said.values())))
    letters = [f"{letter} {meaning}" for letter, meaning in LETTERS.items() if letter in used]
    return [
        *(f"{mode:<{WIDTHS[0]}} sends {words}" for mode, words in said.items()),
        *([f"with {', '.join(letters)}; besides, control messages and headers"] if letters else []),
    ]


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw training losses over time, and the final validation loss of each mode."""
    draw({row.mode: _records(row) for row in rows}, "time", False, path, title)


def _records(row: Row) -> list[dict[str, Any]]:
    trained = [
        {"step": step, "wall_s": end, "loss": loss} for step, (end, loss) in enumerate(row.curve, 1)
    ]
    return [*trained, {"step": len(trained), "wall_s": row.evaluated_s, "val_loss": row.val_loss}]
