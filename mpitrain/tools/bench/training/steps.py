"""The speed of whole training steps, measured in turns with other settings and with PyTorch.

A side is one of the compared programs: our trainer with some settings, or PyTorch. All sides start
from the same weights and train on the same batches.
"""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from mpitrain.config import Config
from mpitrain.errors import ConfigError, on_every_rank
from mpitrain.files import write_whole
from mpitrain.parallel.modes import mode_of
from mpitrain.pipeline.schedules import STREAMS
from mpitrain.run.build import Job
from mpitrain.tools.bench.collectives.table import FAR
from mpitrain.transport.base import Transport

WARM_UP = 3
"""Steps of each side before the first timed step."""
THE_WORK = ("run.", "data.", "model.", "precision.", "batch.size", "optimizer.name", "device.kind")
"""Keys or sections that must be equal on both sides: the computation and the device."""


class Ours:
    """An adapter that gives our trainer the interface of a peer."""

    comm_s = 0.0
    """Seconds of the last step in which this rank waited for messages and their sums."""

    def __init__(self, job: Job, name: str = "mpitrain"):
        self.name, self.job = name, job

    def step(self, index: int, inputs: Any, targets: Any) -> float:
        """Take an optimizer step on this rank's rows and synchronise; return the batch's loss."""
        outcome = self.job.trainer.step(index, inputs, targets)
        self.job.trainer.backend.synchronize()
        self.comm_s = outcome.comm_s
        return outcome.loss

    def close(self) -> None:
        """Release the job's resources. Collective."""
        self.job.close()


class LookingOn:
    """A side in which this rank does not take part."""

    def __init__(self, name: str):
        self.name = name

    def close(self) -> None:
        """Do nothing: there is no resource to release."""


class Result(NamedTuple):
    """The times and losses of one side.

    name    name of the side
    blocks  median seconds per step of each block; a step is timed on its slowest rank
    losses  loss of the whole batch at each timed step
    comm_s  exposed communication seconds of each timed step, on the rank that waited longest;
            empty for a peer
    """

    name: str
    blocks: list[float]
    losses: list[float]
    comm_s: list[float]

    @property
    def step_s(self) -> float:
        """The median over blocks, in seconds."""
        return median(self.blocks)

    @property
    def is_spoilt(self) -> bool:
        """Whether most blocks took far longer than the fastest, so that ratios are invalid."""
        return self.step_s > FAR * min(self.blocks)


class TimedBlock(NamedTuple):
    """One timed block of steps of one side, as a row of the CSV file."""

    side: str
    block: int
    step_s: float


def check_same_work(settings: Sequence[str]) -> None:
    """Raise ConfigError if one of these `section.key=value` would change the computation."""
    for key in map(key_of, settings):
        if key.startswith(THE_WORK):
            raise ConfigError(
                f"--against may change only how the work is done, but {key} changes the work or its device.",
                "Set it for both sides, with --set.",
            )


def check_common_steps(config: Config) -> None:
    """Raise ConfigError for an asynchronous mode: its ranks have no common steps to time."""
    if mode_of(config).records(config.replication):
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
    """Return the name of our side, with its values of the keys in these `section.key=value`."""
    values = config.flat()
    shown = {key: json.dumps(values[key]).strip('"') for key in map(key_of, settings)}
    return " ".join(["mpitrain", *(f"{key}={value}" for key, value in shown.items())])


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
    """Measure blocks of steps of each side in turn, on the same batches. Collective.

    blocks   turns of every side
    steps    steps in each turn, at most
    seconds  bound of all turns: a turn has fewer steps if they take longer
    raises   ConfigError on every rank if turns of one step take longer
    """
    results = [Result(side.name, [], [], []) for side in sides]
    last = [_timed(transport, job, side, range(WARM_UP))[0][-1] for side in sides]
    if blocks * sum(last) > seconds:
        raise on_every_rank(
            ConfigError(
                f"{blocks} steps of each side must take at most {seconds:g} s, but take about "
                f"{blocks * sum(last):.3g} s.",
                "Raise --row-seconds, or leave this shape out.",
            )
        )
    steps = int(min(steps, seconds / (blocks * sum(last))))
    for block in range(blocks):
        first = WARM_UP + block * steps
        for side, result in zip(sides, results, strict=True):
            times, losses, waits = _timed(transport, job, side, range(first, first + steps))
            result.blocks.append(median(times))
            result.losses.extend(losses)
            result.comm_s.extend(waits)
    return results


def _timed(
    transport: Transport, job: Job, side: Any, indices: range
) -> tuple[list[float], list[float], list[float]]:
    """Run steps of one side; return the seconds, loss and exposed communication of each.

    Over the ranks that take part, they are the maximum, the mean and the maximum.
    """
    times, losses, waits = [], [], []
    whose = side.job if isinstance(side, Ours) else job
    for index in indices if not isinstance(side, LookingOn) else ():
        inputs, targets = whose.trainer.replication.rows.batch(job.data, index)
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

    tokens  per step, over all ranks
    """
    width = max(18, *(len(result.name) for result in results))
    lines = [
        f"{'side':<{width}} {'step s':>9} {'comm s':>9} {'tokens/s':>10}   {'step s, blocks':<18} {'last loss':>10}"
    ]
    for result in results:
        spread = f"{min(result.blocks):.4f} .. {max(result.blocks):.4f}"
        rate = f"{tokens / result.step_s:10.0f}" if tokens else f"{'-':>10}"
        waits = f"{median(result.comm_s):9.4f}" if result.comm_s else f"{'-':>9}"
        mark = "~" if result.is_spoilt else " "
        lines.append(
            f"{result.name:<{width}} {result.step_s:9.4f}{mark}{waits} {rate}   {spread:<18} {result.losses[-1]:10.5f}"
        )
    ours, *others = results
    for other in others:
        ratios = against(ours, other)
        apart = max(abs(a - b) for a, b in zip(ours.losses, other.losses, strict=True))
        if ours.is_spoilt or other.is_spoilt:
            lines.append(
                f"{ours.name} and {other.name}: no ratio, as a median block took over {FAR:g} times the fastest (~): "
                f"measure again; losses at most {apart:.1e} apart"
            )
            continue
        lines.append(
            f"{ours.name} is {median(ratios):.3f} times as fast as {other.name} (blocks {min(ratios):.3f} .. "
            f"{max(ratios):.3f}); losses at most {apart:.1e} apart"
        )
    return lines


def against(ours: Result, other: Result) -> list[float]:
    """Return our speed-up over the other side for each block: its seconds divided by ours."""
    return [other_s / our_s for our_s, other_s in zip(ours.blocks, other.blocks, strict=True)]


def block_rows(results: Sequence[Result]) -> list[TimedBlock]:
    """Return the timed blocks of steps of all compared programs, as one list of table rows."""
    return [
        TimedBlock(result.name, number, seconds)
        for result in results
        for number, seconds in enumerate(result.blocks, 1)
    ]


def write_json(
    path: Path,
    header: dict[str, Any],
    results: Sequence[Result],
    kinds: Sequence[tuple[str, float, float]] = (),
) -> None:
    """Write every side's blocks and losses; the first result is ours.

    header  facts about the machine
    kinds   of unit: (kind, seconds of a step, seconds of its bare products)
    """
    sides = [each._asdict() for each in results]
    document: dict[str, Any] = {"header": header, "device": header["device"], "sides": sides}
    if kinds:
        document["kinds"] = [
            {"kind": kind, "step_s": seconds, "products_s": bare} for kind, seconds, bare in kinds
        ]
    write_whole(path, json.dumps(document, indent=1) + "\n")
