"""`mpitrain plan tricks`: measures a job with and without each trick."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.bench.rows import BenchReport
from mpitrain.cli.job_options import (
    CONFIG_FILE,
    DEVICE,
    DP,
    PP,
    PRESET,
    SET,
    TP,
    changes,
    configured,
    output_option,
)
from mpitrain.cli.session import MOST, mpi_session

LEAST_BLOCKS = 5
"""Fewer blocks may agree by chance."""


@click.command("tricks")
@CONFIG_FILE
@PRESET
@SET
@DP
@TP
@PP
@DEVICE
@click.option(
    "--tricks",
    metavar="A,B",
    help="Tricks to try, such as recomputation or ZeRO 3. Default: all.",
)
@click.option(
    "--blocks",
    type=click.IntRange(LEAST_BLOCKS, MOST),
    default=LEAST_BLOCKS,
    show_default=True,
    help="Turns of the job with and without each trick.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, MOST),
    default=3,
    show_default=True,
    help="Steps of a turn.",
)
@output_option("--json", "Write the tricks to this JSON file as they are measured.")
def command(
    config_file: Path | None,
    preset: str | None,
    settings: tuple[str, ...],
    tricks: str | None,
    blocks: int,
    steps: int,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Measure a job with and without each trick: mpitrain launch -n 2 -- plan tricks job.toml

    Start it like the training run. A trick that the job has already is compared with the job
    without it. A time counts as faster or slower if all turns agree, otherwise ~ marks it.
    """
    changed = changes(settings, **options)
    read = cache(lambda: configured(config_file, changed, preset))
    with mpi_session(kind=lambda: read().device.kind) as transport:
        _try(transport, read, tricks, blocks, steps, json_file)


def _try(
    transport: Any,
    read: Callable[[], Any],
    tricks: str | None,
    blocks: int,
    steps: int,
    json_file: Path | None,
) -> None:
    from mpitrain import __version__
    from mpitrain.cli.terminal.progress import way
    from mpitrain.config import with_settings
    from mpitrain.run.build import build
    from mpitrain.run.choices import parse
    from mpitrain.tools.bench.comparison.tricks import TABLE, as_row, names_of, summary, try_all
    from mpitrain.tools.bench.results import machine
    from mpitrain.tools.bench.training.steps import WARM_UP, check_common_steps
    from mpitrain.transport.agreement import on_all_ranks

    def checked() -> tuple[Any, list[str]]:
        names, config = names_of(tricks), read()
        check_common_steps(config)
        length = f"run.steps={len(names) * (WARM_UP + blocks * steps)}"
        return parse(with_settings(config.model_dump(), [length])), names

    facts = {
        "mpitrain": __version__,
        "ranks": transport.size,
        **machine(transport),
        "arguments": sys.argv[1:],
    }
    shown = BenchReport(transport, facts, {"json_file": json_file})
    config, names = on_all_ranks(transport, checked)
    job = build(transport, config)
    config, tried = job.trainer.config, []
    shown.begin(
        [
            f"{config.model.kind}, {job.trainer.parameter_count:,} parameters: {config.batch.size} rows a step by "
            f"{transport.size} rank(s), {way(config)}, {config.precision.compute}, {config.device.kind}",
            f"{blocks} blocks of {steps} step(s), with and without each trick in turns",
            "",
            *TABLE.heading(),
        ],
        len(names),
        "tricks",
    )
    for trial in try_all(transport, job, names, blocks, steps):
        tried.append(trial)
        shown.rows.append(as_row(trial))
        shown.count()
        shown.show("" if trial.reason else TABLE.line(trial))
    job.close()
    shown.end(lambda: summary(tried))
