"""One training job in several modes: time, traffic, memory and loss of each, in turns."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from statistics import fmean, mean, median
from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.parallel.replication.protocol import StepResult
from mpitrain.run.build import Job, build
from mpitrain.run.watchdog import Watchdog
from mpitrain.tools.bench.comparison.formulas import predicted, words_of
from mpitrain.tools.bench.comparison.jobs import WARM_UP
from mpitrain.tools.bench.comparison.waits import WaitRecorder
from mpitrain.transport.base import Transport
from mpitrain.transport.decorators import Recorded

KINDS = ("parameters", "gradients", "state", "scratch", "activations")
"""The kinds of memory of a rank, in the order of the table."""


class ModeRow(NamedTuple):
    """The measurements of one mode.

    workers        ranks that compute gradients
    step_s         seconds of a step, the median of `blocks`
    comm_s         mean seconds per step that a worker waits for messages, on the worst worker
    sent_bytes     by rank: payload of messages per step, mean over all steps
    formula_bytes  the same by formula, for the busiest rank; None without a formula
    held_bytes     by rank: parameters, gradients, optimizer state and scratch of reductions
    staleness      largest number of updates between the pull of parameters and the update by their
                   gradient; 0 in synchronous modes
    lead           largest number of steps that a worker was ahead of the slowest one; 0 in
                   synchronous modes
    curve          (seconds since the start, training loss) after each step on rank 0
    evaluated_s    seconds from the start to the end of the evaluation
    blocks         mean seconds of a step after WARM_UP in each block, on the slowest rank; a mean,
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
    """The steps of one block on this rank.

    began     `perf_counter` at the start
    outcomes  the result of each step
    ends      seconds from the start to the end of each step
    waits     seconds of waits for messages up to the end of each step
    """

    began: float
    outcomes: list[StepResult]
    ends: list[float]
    waits: list[float]

    @property
    def step_s(self) -> float:
        """Mean seconds of a step after WARM_UP."""
        return (self.ends[-1] - self.ends[WARM_UP - 1]) / (len(self.ends) - WARM_UP)

    @property
    def idle(self) -> float:
        """Fraction of these steps in which this rank waits."""
        waited = self.waits[-1] - self.waits[WARM_UP - 1]
        return waited / (self.ends[-1] - self.ends[WARM_UP - 1])


def compare(
    transport: Transport,
    jobs: dict[str, Config],
    stepped: Callable[[str, float], None],
    blocks: int = 1,
) -> Iterator[ModeRow]:
    """Train each job `blocks` times in turns, all with one data source, and evaluate it.

    Collective. A mode's training is the same in every block; the first block gives its losses. In
    the last block the row of a mode is yielded when it is complete.

    stepped  called with the mode and the loss after every step of this rank
    """
    source, rows, times = None, dict[str, ModeRow](), dict[str, list[float]]()
    for block in range(blocks):
        for mode, config in jobs.items():
            with closing(
                Watchdog(transport.rank, config.run.stall_seconds, transport.traffic)
            ) as watchdog:
                watchdog.alive(f"building {mode}")
                waits = WaitRecorder()
                job = build(Recorded(transport, waits), config, source=source)
                source = job.source
                if block == 0:
                    row, trained = _measured(transport, job, mode, waits, watchdog, stepped)
                    rows[mode] = row
                else:
                    trained = _trained(transport, job, mode, waits, watchdog, stepped)
                    job.trainer.sync_parameters()
                times.setdefault(mode, []).append(max(transport.gather_text(trained.step_s)))
                watchdog.alive(f"closing {mode}")
                job.close()  # it is collective, so it is not called after an error
            if block == blocks - 1:
                step_s = median(times[mode])
                yield rows[mode]._replace(
                    step_s=step_s,
                    samples_per_s=config.batch.size / step_s,
                    blocks=times[mode],
                )


def _trained(
    transport: Transport,
    job: Job,
    mode: str,
    waits: WaitRecorder,
    watchdog: Watchdog,
    stepped: Callable[[str, float], None],
) -> TrainedBlock:
    """Train a job to its end. Collective."""
    transport.barrier()
    block = TrainedBlock(time.perf_counter(), [], [], [])
    for outcome, waited in _steps(job, waits, lambda n: watchdog.alive(f"step {n} of {mode}")):
        block.outcomes.append(outcome)
        block.ends.append((outcome.ended or time.perf_counter()) - block.began)
        block.waits.append(waited)
        stepped(mode, outcome.loss)
    return block


def _measured(
    transport: Transport,
    job: Job,
    mode: str,
    waits: WaitRecorder,
    watchdog: Watchdog,
    stepped: Callable[[str, float], None],
) -> tuple[ModeRow, TrainedBlock]:
    """Train and evaluate a job; return its row, with only the times of this block. Collective."""
    trainer, sent = job.trainer, transport.traffic.nbytes
    block = _trained(transport, job, mode, waits, watchdog, stepped)
    outcomes, ends = block.outcomes, block.ends
    trainer.sync_parameters()
    sent = transport.traffic.nbytes - sent
    memory = {**trainer.replication.held_by_kind(), "activations": trainer.arena.peak}
    watchdog.alive(f"the evaluation of {mode}")
    evaluated = trainer.evaluate(job.data)
    assert evaluated is not None
    evaluated_s = time.perf_counter() - block.began
    comm_s = mean(outcome.comm_s for outcome in outcomes[WARM_UP:])
    measurements = block.step_s, comm_s, sent / len(outcomes), block.idle, memory
    times, comms, sent_bytes, idles, memories = zip(
        *transport.gather_text(measurements), strict=True
    )
    axes = trainer.grid.axes
    workers = axes.ranks - axes.servers
    formula_bytes = predicted(transport, job)
    row = ModeRow(
        mode,
        workers,
        max(times),
        trainer.config.batch.size / max(times),
        max(comms[:workers]),
        [*sent_bytes],
        formula_bytes,
        [sum(each.values()) - each["activations"] for each in memories],
        # Every rank has the same values of staleness and lead.
        max(outcome.staleness for outcome in outcomes),
        max(outcome.lead for outcome in outcomes),
        evaluated[0],
        [(end, finite(outcome.loss)) for end, outcome in zip(ends, outcomes, strict=True)],
        evaluated_s,
        [max(times)],
        fmean(idles[:workers]),
        [*memories],
        "" if formula_bytes is None else words_of(trainer.config, workers),
    )
    return row, block


def _steps(
    job: Job, waits: WaitRecorder, alive: Callable[[int], None]
) -> Iterator[tuple[StepResult, float]]:
    """Train a job, and yield the result of every step when it is complete. Collective.

    yields  a result, and the seconds of waits up to the end of its step. An asynchronous pipeline
            knows a result some steps later.
    """
    trainer, replication = job.trainer, job.trainer.replication
    by_step: dict[int, float] = {}
    for index in range(trainer.config.run.steps):
        alive(index + 1)
        own = None
        for number in replication.step_end.steps(index, lambda: False):
            own = trainer.step(number, *replication.rows.batch(job.data, number))
            by_step[number] = waits.seconds
        outcome = replication.step_end.outcome(index, own)
        yield outcome, waits.seconds if outcome.ended is None else by_step.pop(index)


def finite(loss: float) -> float | None:
    """Return the loss, or None if it is not finite."""
    return loss if math.isfinite(loss) else None


def fullest(row: ModeRow) -> dict[str, int]:
    """Return the bytes by kind of the rank with the most memory, activations included."""
    return max(row.memory, key=lambda each: sum(each.values()))


def blocks_agree(row: ModeRow, first: ModeRow) -> bool:
    """Return whether all blocks agree which of two modes is faster. One block always does."""
    ratios = [own_s / first_s for own_s, first_s in zip(row.blocks, first.blocks, strict=True)]
    return all(r > 1 for r in ratios) or all(r < 1 for r in ratios)


SMOOTHED = 5
"""Training losses whose mean is the loss at a time."""


def loss_at(row: ModeRow, seconds: float = math.inf) -> float | None:
    """Return the mean of the last SMOOTHED finite training losses up to a time; None if none.

    A step takes `step_s`, the median over blocks, so that one disturbed block changes little.
    """
    ended = [loss for step, (_, loss) in enumerate(row.curve, 1) if step * row.step_s <= seconds]
    losses = [loss for loss in ended if loss is not None]
    return fmean(losses[-SMOOTHED:]) if losses else None


def equal_time(rows: Sequence[ModeRow]) -> float:
    """Return the seconds after which the fastest mode has ended its last step."""
    return min(len(row.curve) * row.step_s for row in rows)
