"""`mpitrain plan memory` and `batch`: predictions for a job, counted or measured."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.bench.rows import BenchReport
from mpitrain.cli.former import tricks_of
from mpitrain.cli.job_options import (
    CONFIG_FILE,
    CP,
    DATA,
    DEVICE,
    DP,
    EP,
    PP,
    PRESET,
    SET,
    TP,
    Finite,
    Outputs,
    changes,
    check_files,
    configured,
    counted,
    measured,
    output_option,
    path_option,
    say,
)
from mpitrain.cli.session import mpi_session
from mpitrain.errors import multiples_near
from mpitrain.machine import process


def job_options(function: Callable) -> Callable:
    for option in reversed((CONFIG_FILE, PRESET, SET, DATA, DP, CP, EP, TP, PP, DEVICE)):
        function = option(function)
    return function


IMBALANCE = click.option(
    "--imbalance",
    type=Finite(1),
    default=1.0,
    show_default=True,
    metavar="RATIO",
    help="With --ep: tokens at the experts of the counted rank, over those of the mean rank.",
)


@click.command("memory")
@job_options
@IMBALANCE
def memory(
    config_file: Path | None,
    preset: str | None,
    settings: tuple[str, ...],
    imbalance: float,
    **options: Any,
) -> None:
    """Count the activations and the FLOPs of a job, unit by unit, without running it.

    One process counts the ranks of the configured layout; --dp defaults to 1. Bytes are those of
    the arena of a real step. GFLOP are those of matrix products, forward and backward.
    """
    if process.launched().rank > 0:
        return  # only rank 0 prints
    from mpitrain.tools.plan.memory import count, table

    job = configured(config_file, changes(settings, **options), preset)
    say(table(count(job, imbalance)))


@click.command("layout")
@job_options
@click.option("--ranks", type=click.IntRange(1, 1 << 16), required=True, help="Ranks of the job.")
@click.option(
    "--hosts", type=click.IntRange(1), default=1, show_default=True, help="Hosts with equal ranks."
)
@click.option(
    "--rate",
    type=Finite(1e-3),
    metavar="GFLOPS",
    help="GFLOP/s of a rank in the layers of this model (default: its units are timed here).",
)
@click.option(
    "--units",
    "units_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Seconds of units, as written by `bench units` on a rank of the job.",
)
@click.option(
    "--memory",
    type=Finite(1e-3),
    metavar="GB",
    help="Memory of a rank (default: memory.limit_gb, or what is free here).",
)
@IMBALANCE
@path_option("--tuning", "Constants of the cost model, from `bench fit`: replication.tuning.")
@output_option("--json", "Write all layouts to this file.")
@output_option("--plot", "Draw step time over memory to this file (needs mpitrain[report]).")
def layout(
    config_file: Path | None,
    preset: str | None,
    settings: tuple[str, ...],
    ranks: int,
    hosts: int,
    rate: float | None,
    units_file: Path | None,
    memory: float | None,
    imbalance: float,
    tuning: Path | None,
    json_file: Path | None,
    plot_file: Path | None,
    **options: Any,
) -> None:
    """Predict which layout of a job is the fastest: mpitrain plan layout --ranks 16 --hosts 4

    One process, without MPI, tries every dp x cp x tp x pp, stage of ZeRO, number of micro-batches,
    recomputation, and of experts every ep. It predicts step time and memory of each. A layout key that differs from its
    default stays as it is.
    """
    if process.launched().rank > 0:
        return  # only rank 0 prints
    for name in process.BLAS_VARIABLES:  # NumPy is not loaded yet.
        os.environ.setdefault(name, str(max(1, process.cores() * hosts // ranks)))
    from mpitrain.errors import ConfigError
    from mpitrain.files import write_whole
    from mpitrain.tools.plan import uncollected
    from mpitrain.tools.plan.layout import Planner, draw, rank, report
    from mpitrain.tools.plan.units import read_units

    if rate and units_file:
        raise ConfigError(
            "--rate and --units both say how long a rank computes, but both are given.",
            "Leave out one of them.",
        )
    if ranks % hosts:
        raise ConfigError(
            f"Every host has equally many ranks, but {hosts} hosts do not divide {ranks} ranks.",
            f"Take {multiples_near(ranks, hosts)} ranks.",
        )
    check_files(0, [json_file], plot_file)
    if tuning:
        settings = (*settings, f"replication.tuning={tuning}")
    given = configured(config_file, changes(settings, **options), preset)
    names = [f"host {number * hosts // ranks}" for number in range(ranks)]
    work = read_units(units_file) if units_file else 1e9 * rate if rate else None
    bar: Callable[..., Any] = partial(
        click.progressbar, file=sys.stderr, hidden=not sys.stderr.isatty()
    )

    def shown(steps: Iterator[tuple[float, Any]]) -> Iterator[tuple[float, Any]]:
        with bar(length=100, label="units") as units:
            for done, rows in steps:
                units.update(round(100 * done) - units.pos)
                yield done, rows
            units.update(100 - units.pos)

    planner = Planner(given, names, work, 1e9 * (memory or 0), shown, imbalance)
    with uncollected(), bar([*planner.layouts(given)], label="layouts") as layouts:
        ranking = rank(planner, given, layouts)
    say(report(ranking, planner, names))
    outputs = Outputs()
    if json_file:
        facts = {"ranks": ranks, "hosts": hosts, "flops_per_s": planner.rate}
        rows = [each.facts() for each in ranking.predictions]
        with outputs.to(json_file):
            write_whole(json_file, json.dumps({"header": facts, "rows": rows}) + "\n")
    if plot_file:
        with outputs.to(plot_file):
            draw(ranking, planner.limit, plot_file)
    outputs.settle()


@click.command("batch")
@job_options
@counted("--most", 1, 1024, "Rows of the largest micro-batch to try.")
@measured(
    "--seconds",
    1,
    60.0,
    "Time limit for the timed steps, and again for the gradient noise scale.",
    most=86400,
)
@click.option(
    "--verify",
    is_flag=True,
    help="In a pipeline: measure steps with the best number of micro-batches and its neighbours.",
)
@counted("--blocks", 1, 5, "For --verify: turns of each number.")
@counted("--steps", 1, 5, "For --verify: steps in a turn.")
@output_option("--json", "Write the tables and the estimates to this file.")
def batch(
    config_file: Path | None,
    preset: str | None,
    settings: tuple[str, ...],
    most: int,
    seconds: float,
    verify: bool,
    blocks: int,
    steps: int,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Find the best batch of a job: mpitrain launch -n 2 -- plan batch job.toml

    It computes the largest micro-batch that fits in memory, or in memory.limit_gb, and runs a step
    of it. It times steps of several sizes in turns. Gradient norms of two batch sizes give the
    critical batch size. For the same loss, larger batches need many more rows, and smaller batches
    more steps.

    In a pipeline it also measures the stages, the messages between them, and the end of a step. The
    simulator then predicts the time of a step for every number of micro-batches.
    """
    changed = changes(settings, **options)
    read = cache(lambda: configured(config_file, changed, preset))
    verified = (blocks, steps) if verify else None
    with mpi_session(kind=lambda: read().device.kind) as transport:
        plan_batch(transport, read, most, seconds, verified, json_file)


MICRO_BATCHES = click.Command(
    "micro-batches", params=batch.params, callback=batch.callback, help=batch.help, hidden=True
)
"""The old word for `plan batch`, of which it was the part about pipelines."""


def plan_batch(
    transport: Any,
    read: Callable[[], Any],
    most: int,
    seconds: float,
    verified: tuple[int, int] | None,
    json_file: Path | None,
) -> None:
    """Search for the batch of a job, and print the report. Collective.

    read      () -> the configuration
    verified  (turns of each number of micro-batches, steps in a turn) of --verify; None without it
    raises    ConfigError on every rank: with `verified`, also if there is no pipeline
    """
    from tqdm import tqdm

    from mpitrain.cli.terminal.progress import bar
    from mpitrain.run.job import agree_on
    from mpitrain.tools.bench.results import machine
    from mpitrain.tools.plan.batch import report, search

    job = agree_on(transport, read)
    facts = {**machine(transport), "arguments": sys.argv[1:]}
    shown = BenchReport(transport, facts, {"json_file": json_file})
    if verified:
        _check_choice(transport, job)
    with closing(bar(1, form="{desc}") if shown.is_root else tqdm(disable=True)) as phase:
        result = search(transport, job, most, seconds, phase.set_description_str)
    facts |= result.facts()
    shown.rows += result.timed
    shown.show("\n".join(report(result)))
    if verified and result.step:
        _verify(transport, result.resolved.config, result.source, result.step.predicted, *verified)
    shown.end()


def _check_choice(transport: Any, job: Any) -> None:
    """Raise ConfigError on every rank if there is no pipeline, or no choice of micro-batches. Collective."""
    from mpitrain.tools.plan.micro_batches import counts
    from mpitrain.transport.agreement import on_all_ranks

    rows = job.config.batch.size // job.axes.dp
    on_all_ranks(transport, lambda: counts(job.config, job.axes.pp, rows))


def _verify(
    transport: Any, config: Any, source: Any, every: list[Any], blocks: int, steps: int
) -> None:
    from mpitrain.config import with_settings
    from mpitrain.run.build import build
    from mpitrain.run.choices import parse
    from mpitrain.tools.bench.training.steps import STAGES, WARM_UP, Ours, alternate, stage_rows
    from mpitrain.tools.plan.micro_batches import best, neighbours

    predicted, sides = neighbours(every), []
    for prediction in predicted:
        settings = [
            f"batch.micro_batches={prediction.micro_batches}",
            f"run.steps={WARM_UP + blocks * steps}",
        ]
        sides.append(
            Ours(
                build(
                    transport, parse(with_settings(config.model_dump(), settings)), source=source
                ),
                str(prediction.micro_batches),
            )
        )
    results = alternate(transport, sides[0].job, sides, blocks, steps)
    named, quiet = best(predicted), [result for result in results if not result.is_spoilt]
    chosen = sides[predicted.index(named)].job
    rows = stage_rows(chosen.trainer, *chosen.trainer.replica.batch(chosen.data, 0))
    for side in sides:
        side.close()
    lines = ["", f"{'micro-batches':>13} {'predicted ms':>13} {'measured ms':>12}   blocks"]
    for prediction, result in zip(predicted, results, strict=True):
        mark = "~" if result.is_spoilt else " "
        lines.append(
            f"{prediction.micro_batches:>13} {1e3 * prediction.step_s:>13.2f} {1e3 * result.step_s:>12.2f}{mark}  "
            f"{1e3 * min(result.blocks):.2f} .. {1e3 * max(result.blocks):.2f}"
        )
    own = results[predicted.index(named)]
    if own in quiet:
        fastest = min(quiet, key=lambda result: result.step_s)
        lines.append(
            f"measured best: {fastest.side}; a step of {named.micro_batches} takes "
            f"{own.step_s / fastest.step_s:.3f} times as long"
        )
    if len(quiet) < len(results):
        lines.append(
            f"~ {len(results) - len(quiet)} of {len(results)} counts say nothing: other work ran most of the time"
        )
    if transport.rank == 0:
        say([*lines, "", f"stages of {named.micro_batches} micro-batches:", *STAGES.lines(rows)])


tricks = tricks_of(job_options)
