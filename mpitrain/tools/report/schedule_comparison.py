"""Comparison of a run's pipeline with its schedule, simulated at the costs that the traces show."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from mpitrain.config import CONFIG, Config
from mpitrain.errors import ConfigError
from mpitrain.pipeline.schedule_files import find_plan
from mpitrain.pipeline.schedules import STREAMS, training_program
from mpitrain.pipeline.simulate import Cost, simulate
from mpitrain.run.run_dir import configuration
from mpitrain.trace.recorder import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    DEVICE,
    FORWARD,
    UPDATE,
    WAIT,
)
from mpitrain.trace.timeline import Timeline, Trace, computed, within

LOSS = "the loss"


class Compared(NamedTuple):
    """The step of a pipeline, predicted and measured.

    predicted_s, measured_s            seconds from the first to the last instruction of a step
    predicted_bubble, measured_bubble  fraction of that time in which stages do not compute

    Of an asynchronous schedule, the seconds are those from one step to the next, and the prediction
    assumes that the slowest stage computes all the time.
    """

    schedule: str
    stages: int
    micro_batches: int
    predicted_s: float
    predicted_bubble: float
    measured_s: float
    measured_bubble: float

    def __str__(self) -> str:
        return (
            f"Schedule {self.schedule} on {self.stages} stage(s) with {self.micro_batches} micro-batch(es): "
            f"{1e3 * self.predicted_s:.1f} ms a step with {100 * self.predicted_bubble:.1f}% idle time, "
            f"predicted from the compute time of each chunk. Measured: {1e3 * self.measured_s:.1f} ms, "
            f"{100 * self.measured_bubble:.1f}% idle."
        )


def what_was_predicted(run: Path, timeline: Timeline, steps: range) -> Iterator[str]:
    """Yield a line about the schedule of a run, if it has a pipeline and its traces suffice.

    run  the run directory
    """
    if not (run / CONFIG).exists():
        return  # The trace of a program of the user's own.
    try:
        comparison = compare(timeline, steps, configuration(run))
    except ConfigError as error:
        yield f"Nothing can be predicted: {error.law}"
        return
    if comparison and comparison.stages > 1:
        yield str(comparison)


def compare(timeline: Timeline, steps: range, config: Config) -> Compared | None:
    """Compare the steps of the first replica with its schedule; None if the traces do not suffice."""
    replica = [
        trace
        for trace in timeline.traces
        if (place := trace.facts["place"])
        and not (place["dp"] or place["tp"] or place.get("cp"))
        and "parts" in trace.facts
    ]
    stages = config.layout.pp
    if len(replica) != stages:
        return None
    if config.pipeline.schedule in STREAMS:
        return _of_stream(timeline, replica, steps, config)
    plan = find_plan(
        config.pipeline.schedule, stages, config.batch.micro_batches, config.pipeline.chunks or None
    )
    used = {int(chunk): trace for trace in replica for chunk in trace.facts["parts"]}
    if sorted(used) != list(range(len(plan.stage_of))):
        return None
    costs = [
        _cost(used[chunk], chunk, steps, plan.micro_batches, chunk == len(plan.stage_of) - 1)
        for chunk in sorted(used)
    ]
    # A frozen chunk has no record of a backward.
    trained = [chunk for chunk, cost in enumerate(costs) if cost.backward_weight]
    simulated = simulate(training_program(plan, min(trained, default=0)), costs)
    spans = []
    for step in steps:
        instructions = [_instructions(trace, range(step, step + 1)) for trace in replica]
        # A parameter server gives a slow worker no rows in some steps.
        if not all(map(len, instructions)):
            return None
        spans.append(
            max(float(i["end"].max()) for i in instructions)
            - min(float(i["start"].min()) for i in instructions)
        )
    busy = sum(_own(trace, _instructions(trace, steps)) for trace in replica)
    if not sum(spans) > 0:
        return None
    return Compared(
        config.pipeline.schedule,
        stages,
        plan.micro_batches,
        simulated.makespan,
        simulated.bubble,
        fmean(spans),
        1 - busy / (stages * sum(spans)),
    )


def _of_stream(
    timeline: Timeline, replica: Sequence[Trace], steps: range, config: Config
) -> Compared | None:
    """Compare an asynchronous schedule, whose stages do not wait for the end of a step.

    Its updates of parameters count as compute.
    """
    busy = [_own(trace, _instructions(trace, steps, updates=True)) for trace in replica]
    windows = [timeline.window(trace.facts["rank"], steps) for trace in replica]
    took = fmean(end - start for start, end in windows)
    if not took > 0 or not max(busy) > 0:
        return None
    return Compared(
        config.pipeline.schedule,
        len(replica),
        config.batch.micro_batches,
        max(busy) / len(steps),
        1 - fmean(busy) / max(busy),
        took / len(steps),
        1 - fmean(busy) / took,
    )


def _instructions(trace: Trace, steps: range, updates: bool = False) -> np.ndarray:
    """Return the records of a rank's compute for micro-batches in these steps.

    updates  whether to include the updates of parameters
    """
    records = within(trace, steps, computed(trace))
    return records[
        ((records["micro"] >= 0) | (updates & (records["phase"] == UPDATE))) & (records["end"] > 0)
    ]


def _own(trace: Trace, spans: np.ndarray) -> float:
    """Return the seconds of these records, without the waits nested in them.

    Records of a device have no waits.
    """
    if not len(spans):
        return 0.0
    total = float((spans["end"] - spans["start"]).sum())
    if (spans["kind"] == DEVICE).all():
        return total
    waits = trace.records[(trace.records["kind"] == WAIT) & (trace.records["end"] > 0)]
    at = np.searchsorted(spans["start"], waits["start"], side="right") - 1
    inside = (at >= 0) & (waits["end"] <= spans["end"][at])
    return total - float((waits["end"] - waits["start"])[inside].sum())


def _cost(trace: Trace, chunk: int, steps: range, micro_batches: int, is_last: bool) -> Cost:
    """Return the mean seconds of a chunk for one micro-batch.

    A backward with both halves in one counts half for each.
    """
    names = {*trace.facts["parts"][str(chunk)], *([LOSS] if is_last else [])}
    spans = _instructions(trace, steps)
    of_chunk = spans[[trace.names[what][0] in names for what in spans["what"]]]

    def seconds(*phases: int) -> float:
        return (
            _own(trace, of_chunk[np.isin(of_chunk["phase"], phases)]) / len(steps) / micro_batches
        )

    both = seconds(BACKWARD) / 2
    return Cost(
        seconds(FORWARD, 0), seconds(BACKWARD_INPUT) + both, seconds(BACKWARD_WEIGHT) + both
    )
