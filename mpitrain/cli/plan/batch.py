"""`mpitrain plan batch`: the largest and the fastest micro-batch, and the critical batch size."""

import sys
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.job_options import (
    CONFIG_FILE,
    DEVICE,
    DP,
    PP,
    PRESET,
    SET,
    TP,
    Outputs,
    changes,
    check_files,
    configured,
    finite,
    output_option,
)
from mpitrain.cli.session import mpi_session


@click.command("batch")
@CONFIG_FILE
@PRESET
@SET
@DP
@TP
@PP
@DEVICE
@click.option(
    "--most",
    type=click.IntRange(1, 10**6),
    default=1024,
    show_default=True,
    help="Rows of the largest micro-batch to try.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 86400),
    callback=finite,
    default=60,
    show_default=True,
    help="Time limit for the timed steps, and again for the gradient noise scale.",
)
@output_option("--json", "Write the table and the estimates to this file.")
def command(
    config_file: Path | None,
    preset: str | None,
    settings: tuple[str, ...],
    most: int,
    seconds: float,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Find the best batch size of a job: mpitrain launch -n 2 -- plan batch job.toml

    It computes the largest micro-batch that fits in memory, or in memory.limit_gb, and runs a step
    of it. It times steps of several sizes in turns. Gradient norms of two batch sizes give the
    critical batch size. For the same loss, larger batches need many more rows, and smaller batches
    more steps.
    """
    changed = changes(settings, **options)
    read = cache(lambda: configured(config_file, changed, preset))
    with mpi_session(kind=lambda: read().device.kind) as transport:
        _plan(transport, read, most, seconds, json_file)


def _plan(
    transport: Any,
    configured: Callable[[], Any],
    most: int,
    seconds: float,
    json_file: Path | None,
) -> None:
    from tqdm import tqdm

    from mpitrain.cli.terminal.progress import bar
    from mpitrain.run.resolve import agree_on
    from mpitrain.tools.bench.results import machine, write_json
    from mpitrain.tools.plan.batch.search import search
    from mpitrain.tools.plan.batch.text import report
    from mpitrain.transport.agreement import on_all_ranks

    agreed = agree_on(transport, configured)
    on_all_ranks(transport, lambda: check_files(transport.rank, [json_file]))
    is_root, outputs = transport.rank == 0, Outputs()
    with closing(bar(1, form="{desc}") if is_root else tqdm(disable=True)) as shown:
        result = search(transport, agreed, most, seconds, shown.set_description_str)
    if is_root:
        click.echo("\n".join(report(result)))
        if json_file:
            facts = {**machine(transport), "arguments": sys.argv[1:], **result.facts()}
            with outputs.to(json_file):
                write_json(json_file, facts, result.timed)
    on_all_ranks(transport, outputs.settle)
