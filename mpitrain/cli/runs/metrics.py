"""`mpitrain runs metrics`: prints the series of runs as one table, or as CSV."""

import sys
from pathlib import Path

import click

from mpitrain.machine import process


@click.command()
@click.argument(
    "runs", metavar="RUN [RUN ...]", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--csv",
    "is_csv",
    is_flag=True,
    help="Print comma-separated values with all series, for pandas or a spreadsheet.",
)
def command(runs: tuple[Path, ...], is_csv: bool) -> None:
    """Print losses, learning rate, speed and evaluations of runs, a line for each logged step.

    A run that is still going on is shown up to its last line of metrics.jsonl.
    """
    from mpitrain.run.run_dir import metrics_of
    from mpitrain.tools.report.metrics_table import joined, print_columns, write_csv

    if process.launched().rank > 0:
        return  # only rank 0 prints
    rows = [row for run in runs for row in joined(str(run), metrics_of(run))]
    (write_csv if is_csv else print_columns)(rows, sys.stdout)
