"""The time of whole training steps, measured in turns with other settings and with PyTorch.

A side is one of the compared programs: our trainer with some settings, or PyTorch. All sides start
from the same weights and train on the same batches.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.machine.meters import Energy, energy_of
from mpitrain.machine.process import gpu_identities
from mpitrain.parallel.modes import mode_of
from mpitrain.pipeline.schedules import STREAMS, Send, fused_at_the_input, training_program
from mpitrain.pipeline.simulate import peak
from mpitrain.run.job import Job
from mpitrain.run.trainer import Trainer
from mpitrain.tools.bench.turns import Row, measured
from mpitrain.tools.plan.stages import measure
from mpitrain.tools.text_table import TextColumn, TextTable
from mpitrain.transport.base import Transport

WARM_UP = 3
"""Steps of each side before the first timed step."""
THE_WORK = (
    *("run.", "data.", "model.", "lora.", "precision.", "batch.size", "optimizer.", "device.kind"),
)
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


def check_same_work(settings: Sequence[str]) -> None:
    """Raise ConfigError if one of these `section.key=value` changes what a step computes."""
    for key in map(key_of, settings):
        if key.startswith(THE_WORK):
            raise ConfigError(
                "Sides that go on together may change only how the work is done, but "
                f"{key} changes the work or its device.",
                "Set it for all sides, with --set.",
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


def shown(value: Any) -> str:
    """Return a value of a key as a user types it."""
    return json.dumps(value).strip('"')


def key_of(setting: str) -> str:
    return setting.partition("=")[0].strip()


class Kept:
    """A side that stays in memory, and goes on training from turn to turn.

    side  Ours, LookingOn or a peer
    """

    def __init__(self, transport: Transport, job: Job, side: Any, energy: Energy | None = None):
        """Take the steps before the first timed one. Collective.

        job     whose batches the side trains on
        energy  of the host, on one rank
        """
        self._transport, self._job, self._side, self.steps = transport, job, side, 1
        self._energy, self._joules = energy, list[float | None]()
        self.last_s = _timed(transport, job, side, range(WARM_UP))[0][-1]
        """Seconds of the last step of the warm-up."""
        self._seconds, self._losses, self._waits = list[float](), list[float](), list[float]()

    def turn(self, block: int) -> float:
        first = WARM_UP + block * self.steps
        if self._energy:
            self._energy.since()
        times, losses, waits = _timed(
            self._transport, self._job, self._side, range(first, first + self.steps)
        )
        if self._energy:
            self._joules.append(self._energy.since())
        self._seconds += times
        self._losses += losses
        self._waits += waits
        return median(times)

    def row(self) -> Row:
        whose = self._side.job if isinstance(self._side, Ours) else self._job
        config = whose.trainer.config
        tokens = config.batch.size * config.model.context
        joules = [each for each in self._joules if each is not None]
        is_metered = self._energy and len(joules) == len(self._joules)
        return Row(
            self._side.name,
            samples=config.batch.size,
            tokens=tokens if whose.source.form == "tokens" else None,
            losses=[loss if math.isfinite(loss) else None for loss in self._losses],
            ends=[*accumulate(self._seconds)],
            comm_s=median(self._waits) if self._waits else None,
            joules=sum(joules) / len(self._seconds) if is_metered else None,
        )


def alternate(
    transport: Transport,
    job: Job,
    sides: Sequence[Any],
    blocks: int,
    steps: int,
    seconds: float = math.inf,
    of: str = "",
) -> list[Row]:
    """Measure blocks of steps of each side in turns, on the same batches. Collective.

    job      whose batches all sides train on
    blocks   turns of each side
    steps    largest number of steps in a turn
    seconds  upper limit of the time of all turns; a turn has fewer steps if they would take longer
    of       as in `Row`
    raises   ConfigError on every rank if turns of a single step would take longer
    """
    places = gpu_identities(transport.hosts, job.trainer.job.gpus)
    energy = None if transport.rank else energy_of(places)
    kept = [Kept(transport, job, side, energy) for side in sides]
    last_s = sum(side.last_s for side in kept)
    if blocks * last_s > seconds:
        raise ConfigError(
            f"{blocks} steps of each side must take at most {seconds:g} s, but take about "
            f"{blocks * last_s:.3g} s.",
            "Raise --row-seconds, or leave this shape out.",
        ).on_every_rank()
    for side in kept:
        side.steps = int(min(steps, seconds / (blocks * last_s)))
    return [*measured(kept, blocks, of=of)]


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
