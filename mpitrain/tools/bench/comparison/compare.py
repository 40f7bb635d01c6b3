"""One training job in several modes, measured in turns: time, traffic, memory and loss of each mode."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import fmean, mean, median
from typing import Any, NamedTuple

from mpitrain.config import Config
from mpitrain.parallel.replica import StepResult
from mpitrain.run.build import build
from mpitrain.run.job import Job
from mpitrain.run.watchdog import Watchdog
from mpitrain.tools.bench.comparison.formulas import letters_in, predicted, words_of
from mpitrain.tools.bench.comparison.modes import WARM_UP
from mpitrain.tools.bench.plot_loss import draw
from mpitrain.tools.bench.turns import ratios, take_turns, verdict
from mpitrain.tools.text_table import TextColumn, TextTable
from mpitrain.trace.recorder import SILENT, Recorder
from mpitrain.transport.base import Transport

KINDS = ("parameters", "gradients", "state", "scratch", "activations")
"""The kinds of memory of a rank, in the order of the table."""
SMOOTHED = 5
"""Number of training losses whose mean is the loss at a time."""
WIDE = 18
"""Least width of the column of modes."""


class ModeRow(NamedTuple):
    """The measurements of one mode.

    workers        number of ranks that compute gradients
    step_s         seconds of a step, the median of `blocks`
    comm_s         mean seconds per step in which a worker waits for messages, on the worst worker
    sent_bytes     by rank: payload of messages per step, mean over all steps
    formula_bytes  the largest of `sent_bytes` as a formula predicts it; None without a formula
    held_bytes     by rank: parameters, gradients, optimizer state and scratch of reductions
    staleness      largest number of updates between a worker's pull of parameters and the update by
                   the gradient that it computed with them; 0 in synchronous modes
    lead           largest number of steps by which a worker was ahead of the slowest one; 0 in
                   synchronous modes
    curve          (seconds since the start, training loss) after each step on rank 0
    evaluated_s    seconds from the start to the end of the evaluation
    blocks         by block: seconds of a step after WARM_UP, on the slowest rank. They are means,
                   because asynchronous servers report several steps at once
    idle           fraction of the time in which a worker waits for messages, mean over workers
    memory         by rank: bytes of each of KINDS
    formula        the formula of `formula_bytes` in words; empty without a formula
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
    blocks: list[float]
    idle: float
    memory: list[dict[str, int]]
    formula: str


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


def compare(
    transport: Transport,
    jobs: dict[str, Config],
    stepped: Callable[[str, float], None],
    blocks: int = 1,
) -> Iterator[ModeRow]:
    """Train each job `blocks` times in turns, all with one data source, and evaluate it. Collective.

    Every block of a mode trains from the start, with the same losses; those of the first block are
    reported. A mode's row is yielded in the last block, when it is complete.

    stepped  called with the mode and the loss after every step of this rank
    """
    sources, rows = list[Any](), dict[str, ModeRow]()

    def turn(mode: str, block: int) -> float:
        config = jobs[mode]
        with closing(
            Watchdog(transport.rank, config.run.stall_seconds, transport.traffic)
        ) as watchdog:
            watchdog.alive(f"building {mode}")
            recorder = Recorder()
            transport.record(recorder)
            job = build(transport, config, source=sources[0] if sources else None)
            sources[:] = [job.source]
            sent = transport.traffic.nbytes
            trained = _trained(transport, job, mode, recorder, watchdog, stepped)
            job.trainer.sync_parameters()
            if block == 0:
                sent = transport.traffic.nbytes - sent
                rows[mode] = _measured(transport, job, mode, watchdog, trained, sent)
            step_s = max(transport.gather_text(trained.step_s))
            watchdog.alive(f"closing {mode}")
            job.close()  # it is collective, so it is not called after an error
            transport.record(SILENT)
        return step_s

    turns = take_turns([partial(turn, mode) for mode in jobs], blocks)
    for (mode, config), seconds in zip(jobs.items(), turns, strict=True):
        step_s = median(seconds)
        yield rows[mode]._replace(
            step_s=step_s, samples_per_s=config.batch.size / step_s, blocks=seconds
        )


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
) -> ModeRow:
    """Evaluate a trained job; return the mode's row, whose times of blocks are filled in later.

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
    return ModeRow(
        mode=mode,
        workers=workers,
        step_s=0.0,
        samples_per_s=0.0,
        comm_s=max(comms[:workers]),
        sent_bytes=[*sent_bytes],
        formula_bytes=formula_bytes,
        held_bytes=[sum(each.values()) - each["activations"] for each in memories],
        # Every rank has the same values of staleness and lead.
        staleness=max(outcome.extras.get("staleness", 0) for outcome in outcomes),
        lead=max(outcome.extras.get("lead", 0) for outcome in outcomes),
        val_loss=evaluated[0],
        curve=[
            (end, outcome.loss if math.isfinite(outcome.loss) else None)
            for end, outcome in zip(block.ends, outcomes, strict=True)
        ],
        evaluated_s=evaluated_s,
        blocks=[],
        idle=fmean(idles[:workers]),
        memory=[*memories],
        formula="" if formula_bytes is None else words_of(trainer.config, workers),
    )


def loss_at(row: ModeRow, seconds: float = math.inf) -> float | None:
    """Return the mean of the last SMOOTHED finite training losses up to a time; None if there is none.

    Each step is assumed to take `step_s`, the median over blocks, so that one disturbed block
    changes little.
    """
    ended = [loss for step, (_, loss) in enumerate(row.curve, 1) if step * row.step_s <= seconds]
    losses = [loss for loss in ended if loss is not None]
    return fmean(losses[-SMOOTHED:]) if losses else None


def equal_time(rows: Sequence[ModeRow]) -> float:
    """Return the seconds after which the fastest mode has ended its last step."""
    return min(len(row.curve) * row.step_s for row in rows)


def mark(row: ModeRow, first: ModeRow) -> str:
    """Return ~ if the blocks disagree whether a mode is faster than the first one, else ""."""
    is_unsure = row is not first and verdict(ratios(row.blocks, first.blocks)) == "~"
    return "~" if is_unsure else ""


def mode_table(modes: Sequence[str], rows: Sequence[ModeRow]) -> TextTable:
    """Return the table of modes: bytes of the busiest rank, memory of the fullest rank.

    rows  list that grows while modes are measured; the first one is what times are compared with
    """
    return TextTable(
        [
            TextColumn("mode", f"<{max(WIDE, *map(len, modes))}", "mode"),
            TextColumn("workers", "7", "workers"),
            TextColumn("step ms", "9", lambda row: f"{1e3 * row.step_s:.1f}{mark(row, rows[0])}"),
            TextColumn("samples/s", "9.1f", "samples_per_s"),
            TextColumn("exposed ms", "10.1f", lambda row: 1e3 * row.comm_s),
            TextColumn("sent bytes", "13,.0f", lambda row: max(row.sent_bytes)),
            TextColumn("by formula", "13,.0f", "formula_bytes"),
            TextColumn("held MB", "8.1f", lambda row: 1e-6 * max(row.held_bytes)),
            TextColumn("stale", "5", lambda row: row.staleness or None),
            TextColumn("val loss", "8.4f", lambda row: f"{row.val_loss:.4f}"),
        ]
    )


def memory_table(rows: Sequence[ModeRow]) -> list[str]:
    """Return lines with the idle time, the memory by kind and the training losses of each mode.

    Memory is that of the fullest rank. Losses are compared after equal steps and after equal time.
    """
    seconds, fullest = equal_time(rows), {}
    for row in rows:
        fullest[row.mode] = max(row.memory, key=lambda each: sum(each.values()))

    def megabytes(kind: str) -> Callable[[ModeRow], float]:
        return lambda row: 1e-6 * fullest[row.mode][kind]

    after = f"loss, {len(rows[0].curve)} steps", f"loss, {seconds:.3g} s"
    columns = [
        TextColumn("mode", f"<{max(WIDE, *(len(row.mode) for row in rows))}", "mode"),
        TextColumn("idle %", "7.1f", lambda row: 100 * row.idle),
        *(
            TextColumn(kind, f"{width}.2f", megabytes(kind))
            for kind, width in zip(KINDS, (10, 9, 8, 8, 11), strict=True)
        ),
        TextColumn("all MB", "8.2f", lambda row: 1e-6 * sum(fullest[row.mode].values())),
        TextColumn(after[0], f"{len(after[0])}.4f", loss_at, gap=2),
        TextColumn(after[1], f"{len(after[1])}.4f", lambda row: loss_at(row, seconds), gap=2),
    ]
    return TextTable(columns).lines(rows)


def footer(rows: Sequence[ModeRow]) -> list[str]:
    """Return the formulas of these modes in words, and the meaning of their letters."""
    width = max(WIDE, *(len(row.mode) for row in rows))
    formulas = {row.mode: row.formula for row in rows if row.formula}
    letters = [
        f"{letter} {meaning}" for letter, meaning in letters_in([*formulas.values()]).items()
    ]
    table = TextTable([TextColumn("", f"<{width}", 0), TextColumn("", "<", 1)])
    least = min((row.val_loss for row in rows if not row.staleness), default=-math.inf)
    return [
        *(
            f"{row.mode} has a lower loss because of its updates: {row.workers} times as many, "
            f"each with 1/{row.workers} of the rows"
            for row in rows
            if row.staleness and row.val_loss < least
        ),
        *(table.line((mode, f"sends {words}")) for mode, words in formulas.items()),
        *([f"with {', '.join(letters)}; besides, control messages and headers"] if letters else []),
    ]


def spread(rows: Sequence[ModeRow]) -> list[str]:
    blocks = len(rows[0].blocks)
    if blocks == 1:
        return []
    marked = sum(bool(mark(row, rows[0])) for row in rows)
    return [
        f"step ms: median of {blocks} blocks in turns; ~ {marked} of {len(rows)} modes: their blocks disagree "
        f"whether they are faster than {rows[0].mode}"
    ]


def plot(rows: Sequence[ModeRow], title: str, path: Path) -> None:
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        runs[row.mode] = [
            {"step": step, "wall_s": end, "loss": loss}
            for step, (end, loss) in enumerate(row.curve, 1)
        ]
        last = {"step": len(row.curve), "wall_s": row.evaluated_s, "val_loss": row.val_loss}
        runs[row.mode].append(last)
    draw(runs, "time", False, path, title)
