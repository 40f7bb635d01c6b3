"""`mpitrain bench units`: seconds of each kind of unit on one rank, for `plan layout --units`."""

import os
from pathlib import Path
from typing import Any

import click

from mpitrain.cli import RootCommand
from mpitrain.cli.job_options import (
    CONFIG_FILE,
    DEVICE,
    PRESET,
    SET,
    Outputs,
    changes,
    check_files,
    configured,
    path_option,
)
from mpitrain.machine import process


@click.command("units", cls=RootCommand)
@CONFIG_FILE
@PRESET
@SET
@DEVICE
@click.option(
    "--most-rows",
    type=click.IntRange(2, 1 << 16),
    default=8,
    show_default=True,
    help="Rows of the largest micro-batch. Others have 1, 2, 4 rows, and so on.",
)
@click.option(
    "--on-host",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Ranks of the job that share the cores of a host: this one computes with its part.",
)
@path_option("--out", "File to write.", default=Path("units.json"), show_default=True)
def command(
    config_file: Path | None,
    preset: str | None,
    settings: tuple[str, ...],
    most_rows: int,
    on_host: int,
    out: Path,
    **options: Any,
) -> None:
    """Time the units of a model, forward and backward: mpitrain bench units --out units.json

    One process, without MPI, times each kind of unit (embedding, attention, mlp, head) for
    micro-batches of several sizes. `plan layout --units units.json` predicts with these times.
    """
    threads = max(1, process.cores() // on_host)
    for name in process.BLAS_VARIABLES:  # NumPy is not loaded yet.
        os.environ[name] = str(threads)
    from mpitrain.run.build import alone
    from mpitrain.tools.bench.results import write_json
    from mpitrain.tools.plan.layout import ParallelLayout
    from mpitrain.tools.plan.units import facts_of, timed
    from mpitrain.tools.text_table import TextColumn, TextTable

    check_files(0, [out])
    given = configured(config_file, changes(settings, **options), preset)
    job = alone(ParallelLayout(1, 1, 1, 0, 1, "none").of(given), ("",))
    table = TextTable(
        [
            TextColumn("unit", "<14", "unit"),
            TextColumn("rows", "6", "rows"),
            TextColumn("GFLOP", "10.3f", lambda row: row.flops / 1e9),
            TextColumn("ms", "11", lambda row: f"{1e3 * row.seconds:.3f}{'~' * row.is_doubtful}"),
            TextColumn("GFLOP/s", "10.1f", lambda row: row.flops / row.seconds / 1e9),
        ]
    )
    facts = facts_of(job, threads)
    click.echo(f"{facts['processor']}, {facts['device']}, {threads} of {facts['cores']} cores\n")
    click.echo("\n".join(table.heading()))
    rows, sizes = [], [1 << n for n in range(most_rows.bit_length())]
    for row in timed(job, sizes, min(on_host, process.cores() // threads) - 1):
        rows.append(row)
        click.echo(table.line(row))
    outputs = Outputs()
    with outputs.to(out):
        write_json(out, facts, rows)
        click.echo(f"written to {out}")
    outputs.settle()
