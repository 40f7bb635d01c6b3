"""The best number of micro-batches of a pipeline: a step is simulated for each number, with costs measured once."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.pipeline.schedule_files import find_plan
from mpitrain.pipeline.schedules import SCHEDULES, STREAMS, fused_at_the_input, training_program
from mpitrain.pipeline.simulate import Cost, peak, simulate
from mpitrain.run.job import Job, sequences_of
from mpitrain.tools.plan.stages import FAR, MessageTime, StageMeasurement, end_s, measure
from mpitrain.tools.text_table import TextColumn, TextTable, marked

MOST = 64
"""Largest number of candidates; more are thinned out to a roughly constant ratio between them."""

SHOWN = 12
"""Largest number of lines in the table."""

WORTH = {"gpipe": 1.0, "1f1b": 2 / 3, "zero-bubble": 1 / 3, "zb-v": 1 / 6, "v-half": 7 / 12}
"""Bubble per stage beyond the first, in units of a micro-batch's time on one stage.

It is 1 / chunks for interleaved and breadth-first.
"""


class Predicted(NamedTuple):
    """The predicted step for one number of micro-batches.

    rows        of a micro-batch, mean
    step_s      seconds from the first forward to the last update
    bubble      fraction of the time from the first to the last instruction in which stages are idle
    peak_bytes  peak bytes of activations, on the stage with the most
    is_spoilt   whether it is computed from a measurement that other work disturbed
    """

    micro_batches: int
    rows: float
    step_s: float
    bubble: float
    peak_bytes: float
    is_spoilt: bool = False


class StepPredictions(NamedTuple):
    """The predicted steps of a job, ascending by micro-batches, and the measurements behind them.

    rows      of a replica in a step
    measured  by size of a micro-batch, ascending
    end_s     seconds from the last gradient to the end of a step
    """

    rows: int
    measured: list[StageMeasurement]
    end_s: float
    predicted: list[Predicted]


def counts(config: Config, stages: int, rows: int) -> list[int]:
    """Return the possible numbers of micro-batches of a replica with `rows` rows, ascending.

    raises  ConfigError if there is no choice
    """
    name = config.pipeline.schedule
    if stages == 1:
        raise ConfigError(
            "A model on one stage has no bubble that micro-batches would fill, but layout.pp is 1.",
            "Start with several ranks and --pp 2, or more.",
        )
    if name in STREAMS:
        raise ConfigError(
            f"Steps of schedule {name} do not end one by one, so no single step can be timed.",
            f"Set pipeline.schedule to one of {', '.join(SCHEDULES)}.",
        )
    if name not in SCHEDULES:
        find_plan(name)
        raise ConfigError(
            f"A schedule in a file has its number of micro-batches, and {name} is one.",
            f"Set pipeline.schedule to one of {', '.join(SCHEDULES)}.",
        )
    step = stages if SCHEDULES[name].grouped else 1
    fitting = sequences_of(config)
    numbers = [
        count
        for count in range(stages, rows + 1, step)
        if fitting == 1 or rows % (count * fitting) == 0
    ]
    if not numbers:
        raise ConfigError(
            f"A pipeline of {stages} stages needs as many micro-batches, but a replica has {rows} row(s).",
            f"Set batch.size to at least {stages} for each of the dp replicas.",
        )
    if len(numbers) > MOST:
        numbers = sorted(
            {numbers[round((len(numbers) ** (i / (MOST - 1))) - 1)] for i in range(MOST)}
        )
    return numbers


def sizes(counts: Sequence[int], rows: int, fitting: int = 1) -> list[int]:
    """Return the sizes of micro-batches to measure, in rows.

    The smallest and the largest one are those of `counts`. Between them are powers of two times
    `fitting`.
    """
    least, most = rows // counts[-1], -(-rows // counts[0])
    between = (fitting << i for i in range(most.bit_length()) if least < fitting << i < most)
    return sorted({least, most, *between})


def around(
    measured: Sequence[StageMeasurement], rows: float
) -> tuple[StageMeasurement, StageMeasurement]:
    right = min(max(1, bisect_left([each.rows for each in measured], rows)), len(measured) - 1)
    return measured[max(0, right - 1)], measured[right]


def between(measured: Sequence[StageMeasurement], rows: float) -> tuple[list[Cost], MessageTime]:
    """Return the costs and message time of micro-batches of `rows` rows, interpolated linearly."""
    low, high = around(measured, rows)
    fraction = (rows - low.rows) / (high.rows - low.rows) if high.rows > low.rows else 0.0

    def mixed(at_low: Sequence[float], at_high: Sequence[float]) -> list[float]:
        return [max(0.0, a + fraction * (b - a)) for a, b in zip(at_low, at_high, strict=True)]

    transfer, receive = mixed(low.way[:2], high.way[:2])
    way = MessageTime(transfer, receive, low.way.is_eager and high.way.is_eager)
    return [Cost(*mixed(a, b)) for a, b in zip(low.costs, high.costs, strict=True)], way


def predict(
    config: Config,
    stages: int,
    rows: int,
    counts: Sequence[int],
    measured: Sequence[StageMeasurement],
    end_s: float,
    lowest: int = 0,
) -> list[Predicted]:
    """Predict a step for each number of micro-batches.

    rows, measured, end_s  as in StepPredictions
    lowest                 the first chunk with a backward; all chunks before it are frozen
    """
    predictions = []
    for count in counts:
        plan = fused_at_the_input(
            find_plan(config.pipeline.schedule, stages, count, config.pipeline.chunks or None),
            lowest,
        )
        costs, way = between(measured, rows / count)
        simulation = simulate(training_program(plan, lowest), costs, *way)
        most = max(peak(instructions, costs).nbytes for instructions in plan.by_stage)
        near = around(measured, rows / count)
        exact = [each for each in near if each.rows == rows / count]
        is_spoilt = any(each.is_spoilt for each in exact or near)
        predictions.append(
            Predicted(
                count, rows / count, simulation.makespan + end_s, simulation.bubble, most, is_spoilt
            )
        )
    return predictions


def measured_predictions(job: Job, resolved: Job, choices: Sequence[int]) -> StepPredictions:
    """Measure a job, and predict its step for each number of micro-batches. Collective.

    job       built, with at least the rows of the largest micro-batch
    resolved  the same job with the batch to predict
    """
    trainer, config = job.trainer, resolved.config
    rows = config.batch.size // resolved.axes.dp
    inputs, targets = trainer.replica.batch(job.data, 0)
    measured = measure(trainer, inputs, targets, sizes(choices, rows, sequences_of(config)))
    ending = end_s(trainer, inputs[: measured[0].rows], targets[: measured[0].rows])
    stages, lowest = resolved.axes.pp, trainer.pipe.lowest
    predicted = predict(config, stages, rows, choices, measured, ending, lowest)
    return StepPredictions(rows, measured, ending, predicted)


def best(predicted: Sequence[Predicted]) -> Predicted:
    """Return the fastest prediction; of equal ones, the one with the fewest micro-batches.

    A spoilt prediction is returned only if all are spoilt.
    """
    return min(predicted, key=lambda each: (each.is_spoilt, each.step_s))


def advice(predicted: Sequence[Predicted]) -> list[str]:
    spoilt = sum(each.is_spoilt for each in predicted)
    lines = [
        f"~ {spoilt} of {len(predicted)} counts: measured while other work ran, the median above {FAR:g} times the fastest"
    ]
    lines = lines if spoilt else []
    if spoilt == len(predicted):
        return [*lines, "No count can be named: measure again while nothing else runs."]
    return [*lines, f"Set batch.micro_batches to {best(predicted).micro_batches}."]


def neighbours(predicted: Sequence[Predicted]) -> list[Predicted]:
    at = predicted.index(best(predicted))
    return [*predicted[max(0, at - 1) : at + 2]]


def table(predicted: Sequence[Predicted]) -> list[str]:
    """Return a table of predictions: the best one, its neighbours, and some evenly spaced others."""
    near, named = neighbours(predicted), best(predicted)
    others = [each for each in predicted if each not in near]
    room = max(1, SHOWN - len(near))
    if len(others) > room:
        others = [others[round(i * (len(others) - 1) / (room - 1))] for i in range(room)]
    columns = TextTable(
        [
            TextColumn("micro-batches", "13", "micro_batches"),
            TextColumn("rows each", "10.4g", "rows"),
            TextColumn("step ms", "10.2f", lambda each: 1e3 * each.step_s),
            TextColumn("", "1", lambda each: marked("", each.is_spoilt), gap=0),
            TextColumn("bubble", "8", lambda each: f"{100 * each.bubble:.1f}%", gap=0),
            TextColumn("peak MB", "9.2f", lambda each: each.peak_bytes / 1e6),
            TextColumn(
                "", "<", lambda each: "   <- best" * (each == named and not each.is_spoilt), gap=0
            ),
        ]
    )
    return columns.lines(sorted([*near, *others]))


def explanation(
    config: Config, stages: int, rows: int, measured: Sequence[StageMeasurement]
) -> list[str]:
    """Return lines that explain the best number of micro-batches.

    They name the time of a micro-batch that does not depend on its rows, on the slowest stage, and
    the number of micro-batches at which this time is as large as the bubble.
    """
    chunks = len(measured[0].costs) // stages
    name = config.pipeline.schedule
    worth = WORTH.get(name, 1 / chunks if SCHEDULES[name].chunks is None else 0.0)
    if measured[0].is_spoilt or measured[-1].is_spoilt:
        return [
            "Other work ran while the smallest or the largest size was measured: what a micro-batch costs is not known."
        ]
    low, high = (
        max(sum(cost[:3]) for cost in each.costs) * chunks for each in (measured[0], measured[-1])
    )
    width = measured[-1].rows - measured[0].rows
    if not width or not worth:
        return []
    row_s = (high - low) / width
    fixed = low - row_s * measured[0].rows
    if min(fixed, row_s) <= 0:
        return [
            "By the smallest and the largest size a micro-batch costs the slowest stage nothing besides its rows."
        ]
    ideal = math.sqrt(worth * (stages - 1) * row_s * rows / fixed)
    root = f"sqrt({worth:.2g} x {stages - 1} x {1e3 * row_s * rows:.3g} / {1e3 * fixed:.3g})"
    return [
        f"On the slowest stage a row takes {1e3 * row_s:.3g} ms, and a micro-batch {1e3 * fixed:.3g} ms besides.",
        f"Where messages take no time, about {root} = {ideal:.1f} micro-batches are best.",
    ]


def report(resolved: Job, step: StepPredictions, parameters: int) -> list[str]:
    """Return lines: the measurement, the table, and the recommended setting.

    parameters  number of the model's parameters
    """
    config, stages, measured = resolved.config, resolved.axes.pp, step.measured
    message = measured[-1].way
    protocol = "eagerly" if message.is_eager else "by rendezvous"
    return [
        f"{stages} stages by {config.pipeline.schedule}, {step.rows} rows in each of {resolved.axes.dp} replica(s), "
        f"{parameters:,} parameters, {config.device.kind}",
        f"measured with {', '.join(str(each.rows) for each in measured)} row(s) in a micro-batch; of "
        f"{measured[-1].rows} a message, sent {protocol}, takes",
        f"{1e3 * message.transfer:.2f} ms beside compute and {1e3 * message.receive:.2f} "
        f"ms of its receiver's; the end of a step {1e3 * step.end_s:.2f} ms",
        "",
        *table(step.predicted),
        "",
        *explanation(config, stages, step.rows, measured),
        *advice(step.predicted),
    ]
