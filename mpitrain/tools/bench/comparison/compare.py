"""Trainings of one job from the start with several settings: time, traffic, memory and loss of each."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from statistics import fmean, mean
from typing import Any, NamedTuple

from mpitrain.config import Config
from mpitrain.parallel.replica import StepResult
from mpitrain.run.build import build
from mpitrain.run.job import Job
from mpitrain.run.watchdog import Watchdog
from mpitrain.tools.bench.comparison.formulas import letters_in, predicted, words_of
from mpitrain.tools.bench.comparison.modes import WARM_UP
from mpitrain.tools.bench.table import WIDE
from mpitrain.tools.bench.turns import Row, measured
from mpitrain.tools.text_table import TextColumn, TextTable
from mpitrain.trace.recorder import SILENT, Recorder
from mpitrain.transport.base import Transport

KINDS = ("parameters", "gradients", "state", "scratch", "activations")
"""The kinds of memory of a rank, in the order of the table."""
SMOOTHED = 5
"""Number of training losses whose mean is the loss at a time."""


class TrainedBlock(NamedTuple):
    """The steps that one block trained on this rank.

    began     `time.perf_counter()` at the start of the block
    outcomes  result of each step
    ends      by step: seconds from the start of the block to the end of the step
    waits     by step: seconds of waits for messages up to the end of the step, those of a pipeline
              stage for its neighbours included
    """

    began: float
    outcomes: list[StepResult]
    ends: list[float]
    waits: list[float]

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, without the first WARM_UP steps."""
        return (self.ends[-1] - self.ends[WARM_UP - 1]) / (len(self.ends) - WARM_UP)

    @property
    def idle(self) -> float:
        """Fraction of the time of these steps in which this rank waits for messages."""
        waited = self.waits[-1] - self.waits[WARM_UP - 1]
        return waited / (self.ends[-1] - self.ends[WARM_UP - 1])


class Training:
    """A side that trains a job from the start in each of its turns; the first training is reported.

    sources  holds the data source of all sides, once the first one has opened it
    stepped  called with the side's name and the loss after every step of this rank
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        config: Config,
        sources: list[Any],
        stepped: Callable[[str, float], None],
    ):
        self.name, self._transport, self._config = name, transport, config
        self._sources, self._stepped, self._row = sources, stepped, Row(name)

    def turn(self, block: int) -> float:
        transport, config = self._transport, self._config
        with closing(
            Watchdog(transport.rank, config.run.stall_seconds, transport.traffic)
        ) as watchdog:
            watchdog.alive(f"building {self.name}")
            recorder = Recorder()
            transport.record(recorder)
            job = build(transport, config, source=self._sources[0] if self._sources else None)
            self._sources[:] = [job.source]
            sent = transport.traffic.nbytes
            trained = _trained(transport, job, self.name, recorder, watchdog, self._stepped)
            job.trainer.sync_parameters()
            if block == 0:
                sent = transport.traffic.nbytes - sent
                self._row = _measured(transport, job, self.name, watchdog, trained, sent)
            step_s = max(transport.gather_text(trained.step_s))
            watchdog.alive(f"closing {self.name}")
            job.close()  # it is collective, so it is not called after an error
            transport.record(SILENT)
        return step_s

    def row(self) -> Row:
        return self._row


def compare(
    transport: Transport,
    jobs: dict[str, Config],
    stepped: Callable[[str, float], None],
    blocks: int = 1,
) -> Iterator[Row]:
    """Train each job `blocks` times in turns, all with one data source, and evaluate it. Collective."""
    sources = list[Any]()
    sides = [Training(transport, name, job, sources, stepped) for name, job in jobs.items()]
    return measured(sides, blocks)


def _trained(
    transport: Transport,
    job: Job,
    mode: str,
    recorder: Recorder,
    watchdog: Watchdog,
    stepped: Callable[[str, float], None],
) -> TrainedBlock:
    """Train a job to its end. Collective.

    An asynchronous pipeline returns the result of a step some steps later.
    """
    transport.barrier()
    block = TrainedBlock(time.perf_counter(), [], [], [])
    trainer, replica = job.trainer, job.trainer.replica
    waited: dict[int, float] = {}
    for index in range(trainer.config.run.steps):
        watchdog.alive(f"step {index + 1} of {mode}")
        own = None
        for number in replica.steps(index, lambda: False):
            own = trainer.step(number, *replica.batch(job.data, number))
            waited[number] = recorder.waited
        outcome = replica.outcome(index, own)
        block.outcomes.append(outcome)
        block.ends.append((outcome.extras.get("ended") or time.perf_counter()) - block.began)
        block.waits.append(
            recorder.waited if outcome.extras.get("ended") is None else waited.pop(index)
        )
        stepped(mode, outcome.loss)
    return block


def _measured(
    transport: Transport, job: Job, mode: str, watchdog: Watchdog, block: TrainedBlock, sent: int
) -> Row:
    """Evaluate a trained job; return the side's row without its times.

    Collective.

    sent  bytes that this rank has sent in the block
    """
    trainer, outcomes = job.trainer, block.outcomes
    memory = {**trainer.replica.held_by_kind(), "activations": trainer.arena.peak}
    watchdog.alive(f"the evaluation of {mode}")
    evaluated = trainer.evaluate(job.data)
    assert evaluated is not None
    evaluated_s = time.perf_counter() - block.began
    comm_s = mean(outcome.comm_s for outcome in outcomes[WARM_UP:])
    comms, sent_bytes, idles, memories = zip(
        *transport.gather_text((comm_s, sent / len(outcomes), block.idle, memory)), strict=True
    )
    axes = trainer.grid.axes
    workers = axes.ranks - axes.servers
    formula_bytes = predicted(transport, job)
    config = trainer.config
    return Row(
        mode,
        samples=config.batch.size,
        tokens=config.batch.size * config.model.context if job.source.form == "tokens" else None,
        losses=[each.loss if math.isfinite(each.loss) else None for each in outcomes],
        ends=block.ends,
        val_loss=evaluated[0],
        evaluated_s=evaluated_s,
        workers=workers,
        comm_s=max(comms[:workers]),
        idle=fmean(idles[:workers]),
        sent_bytes=[*sent_bytes],
        formula_bytes=formula_bytes,
        formula="" if formula_bytes is None else words_of(config, workers),
        memory=[*memories],
        # Every rank has the same values of staleness and lead.
        staleness=max(outcome.extras.get("staleness", 0) for outcome in outcomes),
        lead=max(outcome.extras.get("lead", 0) for outcome in outcomes),
    )


def loss_at(row: Row, seconds: float = math.inf) -> float | None:
    """Return the mean of the last SMOOTHED finite training losses up to a time; None if there is none.

    Each step is assumed to take `step_s`, the median over blocks, so that one disturbed block
    changes little.
    """
    ended = [loss for step, loss in enumerate(row.losses, 1) if step * row.step_s <= seconds]
    losses = [loss for loss in ended if loss is not None]
    return fmean(losses[-SMOOTHED:]) if losses else None


def equal_time(rows: Sequence[Row]) -> float:
    """Return the seconds after which the fastest mode has ended its last step."""
    return min(len(row.losses) * row.step_s for row in rows)


def memory_table(rows: Sequence[Row]) -> list[str]:
    """Return lines with the idle time, the memory by kind and the training losses of each mode.

    Memory is that of the fullest rank. Losses are compared after equal steps and after equal time.
    """
    seconds, fullest = equal_time(rows), {}
    for row in rows:
        fullest[row.side] = max(row.memory, key=lambda each: sum(each.values()))

    def megabytes(kind: str) -> Callable[[Row], float]:
        return lambda row: 1e-6 * fullest[row.side][kind]

    after = f"loss, {len(rows[0].losses)} steps", f"loss, {seconds:.3g} s"
    columns = [
        TextColumn("side", f"<{max(WIDE, *(len(row.side) for row in rows))}", "side"),
        TextColumn("idle %", "7.1f", lambda row: 100 * (row.idle or 0.0)),
        *(
            TextColumn(kind, f"{width}.2f", megabytes(kind))
            for kind, width in zip(KINDS, (10, 9, 8, 8, 11), strict=True)
        ),
        TextColumn("all MB", "8.2f", lambda row: 1e-6 * sum(fullest[row.side].values())),
        TextColumn(after[0], f"{len(after[0])}.4f", loss_at, gap=2),
        TextColumn(after[1], f"{len(after[1])}.4f", lambda row: loss_at(row, seconds), gap=2),
    ]
    return TextTable(columns).lines(rows)


def footer(rows: Sequence[Row]) -> list[str]:
    """Return the formulas of these modes in words, and the meaning of their letters."""
    width = max(WIDE, *(len(row.side) for row in rows))
    formulas = {row.side: row.formula for row in rows if row.formula}
    letters = [
        f"{letter} {meaning}" for letter, meaning in letters_in([*formulas.values()]).items()
    ]
    table = TextTable([TextColumn("", f"<{width}", 0), TextColumn("", "<", 1)])
    least = min((row.val_loss for row in rows if not row.staleness), default=-math.inf)
    return [
        *(
            f"{row.side} has a lower loss because of its updates: {row.workers} times as many, "
            f"each with 1/{row.workers} of the rows"
            for row in rows
            if row.staleness and row.val_loss < least
        ),
        *(table.line((mode, f"sends {words}")) for mode, words in formulas.items()),
        *([f"with {', '.join(letters)}; besides, control messages and headers"] if letters else []),
    ]
