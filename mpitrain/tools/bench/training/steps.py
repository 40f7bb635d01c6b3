"""The time of whole training steps, measured in turns with other settings and with PyTorch.

A side is one of the compared programs: our trainer with some settings, or PyTorch. All sides start
from the same weights and train on the same batches.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.parallel.modes import mode_of
from mpitrain.pipeline.instructions import Send, fused_at_the_input, training_program
from mpitrain.pipeline.schedules import STREAMS
from mpitrain.pipeline.simulate import peak
from mpitrain.run.job import Job
from mpitrain.run.trainer import Trainer
from mpitrain.tools.bench.turns import FAR, is_spoilt, ratios, spread, take_turns
from mpitrain.tools.plan.stages import measure
from mpitrain.tools.text_table import TextColumn, TextTable, marked
from mpitrain.transport.base import Transport

WARM_UP = 3
"""Steps of each side before the first timed step."""
THE_WORK = ("run.", "data.", "model.", "precision.", "batch.size", "optimizer.name", "device.kind")
"""Keys or sections that must be equal on both sides: the computation and the device."""


class Ours:
    """Our trainer as a side of a comparison."""

    comm_s = 0.0
    """Seconds of the last step in which this rank waited for messages and their sums."""

    def __init__(self, job: Job, name: str = "mpitrain"):
        self.name, self.job = name, job

    def step(self, index: int, inputs: Any, targets: Any) -> float:
        """Train on this rank's rows, and wait for the device; return the loss of the whole batch."""
        outcome = self.job.trainer.step(index, inputs, targets)
        self.job.trainer.backend.synchronize()
        self.comm_s = outcome.comm_s
        return outcome.loss

    def close(self) -> None:
        self.job.close()


class LookingOn:
    def __init__(self, name: str):
        self.name = name

    def close(self) -> None:
        pass


class Result(NamedTuple):
    """The times and losses of one side.

    name    of the side
    blocks  by block: median seconds of a step; a step is timed on its slowest rank
    losses  by timed step: loss of the whole batch
    comm_s  by timed step: seconds of exposed communication, on the rank that waited longest; empty
            for a peer
    """

    name: str
    blocks: list[float]
    losses: list[float]
    comm_s: list[float]

    @property
    def step_s(self) -> float:
        """Median of `blocks`."""
        return median(self.blocks)

    @property
    def is_spoilt(self) -> bool:
        return is_spoilt(self.blocks)


def check_same_work(settings: Sequence[str]) -> None:
    """Raise ConfigError if one of these `section.key=value` changes what a step computes."""
    for key in map(key_of, settings):
        if key.startswith(THE_WORK):
            raise ConfigError(
                f"--against may change only how the work is done, but {key} changes the work or its device.",
                "Set it for both sides, with --set.",
            )


def check_common_steps(config: Config) -> None:
    """Raise ConfigError for an asynchronous mode: its ranks have no steps in common to time."""
    if mode_of(config.replication, config.pipeline.schedule).records(config.replication):
        raise ConfigError(
            "Turns need steps that all ranks make together, but replication.update is "
            f"{config.replication.update}.",
            "Set replication.update=sync.",
        )
    if config.pipeline.schedule in STREAMS:
        raise ConfigError(
            "Turns are of steps that all ranks make together, but in pipeline.schedule "
            f"{config.pipeline.schedule} none ends.",
            "Take another schedule, or `mpitrain train`.",
        )


def named(config: Config, settings: Sequence[str]) -> str:
    """Return the name of our side, with the values of the keys in these `section.key=value`."""
    values, keys = config.flat(), dict.fromkeys(map(key_of, settings))
    return " ".join(["mpitrain", *(f"{key}={shown(values[key])}" for key in keys)])


def shown(value: Any) -> str:
    """Return a value of a key as a user types it."""
    return json.dumps(value).strip('"')


def key_of(setting: str) -> str:
    return setting.partition("=")[0].strip()


def alternate(
    transport: Transport,
    job: Job,
    sides: Sequence[Any],
    blocks: int,
    steps: int,
    seconds: float = math.inf,
) -> list[Result]:
    """Measure blocks of steps of each side in turns, on the same batches. Collective.

    job      whose batches all sides train on
    blocks   turns of each side
    steps    largest number of steps in a turn
    seconds  upper limit of the time of all turns; a turn has fewer steps if they would take longer
    raises   ConfigError on every rank if turns of a single step would take longer
    """
    results = [Result(side.name, [], [], []) for side in sides]
    last = [_timed(transport, job, side, range(WARM_UP))[0][-1] for side in sides]
    if blocks * sum(last) > seconds:
        raise ConfigError(
            f"{blocks} steps of each side must take at most {seconds:g} s, but take about "
            f"{blocks * sum(last):.3g} s.",
            "Raise --row-seconds, or leave this shape out.",
        ).on_every_rank()
    steps = int(min(steps, seconds / (blocks * sum(last))))

    def turn(side: Any, result: Result, block: int) -> float:
        first = WARM_UP + block * steps
        times, losses, waits = _timed(transport, job, side, range(first, first + steps))
        result.losses.extend(losses)
        result.comm_s.extend(waits)
        return median(times)

    turns = [partial(turn, *each) for each in zip(sides, results, strict=True)]
    for result, times in zip(results, take_turns(turns, blocks), strict=True):
        result.blocks.extend(times)
    return results


def _timed(
    transport: Transport, job: Job, side: Any, indices: range
) -> tuple[list[float], list[float], list[float]]:
    """Take steps of one side; return lists of their seconds, losses and exposed communication.

    Over the ranks that take part in a step, the lists have the longest time, the mean loss and the
    longest wait.
    """
    times, losses, waits = [], [], []
    whose = side.job if isinstance(side, Ours) else job
    for index in indices if not isinstance(side, LookingOn) else ():
        inputs, targets = whose.trainer.replica.batch(job.data, index)
        whose.trainer.transport.barrier()
        start = time.perf_counter()
        losses.append(side.step(index, inputs, targets))
        times.append(time.perf_counter() - start)
        if isinstance(side, Ours):
            waits.append(side.comm_s)
    # Ranks that take no part in this job have no times.
    gathered = [each for each in transport.gather_text([times, losses, waits]) if each[0]]
    slowest, all_losses, longest = (
        list(zip(*each, strict=True)) for each in zip(*gathered, strict=True)
    )
    return [*map(max, slowest)], [*map(fmean, all_losses)], [*map(max, longest)]


def table(results: Sequence[Result], tokens: int) -> list[str]:
    """Format the results as lines, and compare each with the first one.

    tokens  of a step, over all ranks
    """
    width = max(18, *(len(result.name) for result in results))
    columns = [
        TextColumn("side", f"<{width}", "name"),
        TextColumn("step s ", "10", lambda one: marked(f"{one.step_s:.4f}", one.is_spoilt)),
        TextColumn("comm s", "9.4f", lambda one: median(one.comm_s) if one.comm_s else None, gap=0),
        TextColumn("tokens/s", "10.0f", lambda one: tokens / one.step_s if tokens else None),
        TextColumn("step s, blocks", "<18", lambda one: spread(one.blocks, 4), gap=3),
        TextColumn("last loss", "10.5f", lambda one: f"{one.losses[-1]:.5f}"),
    ]
    lines = TextTable(columns).lines(results)
    ours, *others = results
    for other in others:
        times = ratios(ours.blocks, other.blocks)
        apart = max(abs(a - b) for a, b in zip(ours.losses, other.losses, strict=True))
        if ours.is_spoilt or other.is_spoilt:
            lines.append(
                f"{ours.name} and {other.name}: no ratio, as a median block took over {FAR:g} times the fastest (~): "
                f"measure again; losses at most {apart:.1e} apart"
            )
            continue
        lines.append(
            f"{ours.name} is {median(times):.3f} times as fast as {other.name} (blocks {spread(times, 3)}); "
            f"losses at most {apart:.1e} apart"
        )
    return lines


class StageRow(NamedTuple):
    """A pipeline stage, on its rank with the most memory.

    activations, gradients  numbers of messages that the stage sent in the step
    planned_...             numbers of these messages in the schedule
    sent_bytes              payload of these messages
    peak_bytes              peak bytes of activations
    simulated_bytes         peak bytes as simulated from the measured bytes of each unit
    """

    stage: int
    units: int
    activations: int
    gradients: int
    planned_activations: int
    planned_gradients: int
    sent_bytes: int
    peak_bytes: int
    simulated_bytes: float


def stage_rows(trainer: Trainer, inputs: np.ndarray, targets: np.ndarray) -> list[StageRow]:
    """Return a row for each stage, about the last step. Collective.

    inputs, targets  rows of this rank, as many as it had in the step
    """
    pipe, stage = trainer.pipe, trainer.grid.coords.pp
    plan = fused_at_the_input(trainer.job.plan, pipe.lowest)
    program = training_program(plan, pipe.lowest)[stage]
    sent, sent_bytes = pipe.channel.sent["activation"]
    returned, returned_bytes = pipe.channel.sent["gradient"]
    held = pipe.peak_bytes
    most = -(-len(inputs) // plan.micro_batches)
    costs = measure(trainer, inputs, targets, [most])[0].costs
    planned = Counter(i.what for i in program if isinstance(i, Send))
    own_row = StageRow(
        stage,
        len(trainer.units),
        sent,
        returned,
        planned["activation"],
        planned["gradient"],
        sent_bytes + returned_bytes,
        held,
        peak(plan.by_stage[stage], costs).nbytes,
    )
    rows = sorted(StageRow(*row) for row in trainer.transport.gather_text(own_row))
    return [
        max((row for row in rows if row.stage == number), key=lambda row: row.peak_bytes)
        for number in range(trainer.grid.axes.pp)
    ]


STAGES = TextTable(
    [
        TextColumn("stage", "5", "stage"),
        TextColumn("units", "6", "units"),
        TextColumn(
            "activations sent", "17", lambda row: f"{row.activations} of {row.planned_activations}"
        ),
        TextColumn(
            "gradients sent", "15", lambda row: f"{row.gradients} of {row.planned_gradients}"
        ),
        TextColumn("MB sent", "9.2f", lambda row: row.sent_bytes / 1e6),
        TextColumn("peak activations MB", "20.2f", lambda row: row.peak_bytes / 1e6),
        TextColumn("simulated", "10.2f", lambda row: row.simulated_bytes / 1e6),
        TextColumn(
            "ratio",
            "6.2f",
            lambda row: row.peak_bytes / row.simulated_bytes if row.simulated_bytes else None,
        ),
    ]
)
"""A line for each `StageRow`."""
