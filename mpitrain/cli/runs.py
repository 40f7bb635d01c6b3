"""`mpitrain runs`: `plot` draws loss curves, `metrics` prints series, `checkpoints` lists and verifies, `diff` finds the
first difference of two runs.
"""

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpitrain.cli import RootCommand
from mpitrain.cli.job_options import PLUGINS, path_option
from mpitrain.machine import process

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpitrain.tools.report.diff import ComparedRun


RUN = click.Path(path_type=Path)


@click.command("plot", cls=RootCommand)
@click.argument("runs", metavar="RUN_DIR [RUN_DIR ...]", nargs=-1, required=True, type=RUN)
@path_option("--out", "Picture to write.", default=Path("curves.png"), show_default=True)
@click.option(
    "--over",
    type=click.Choice(["steps", "tokens", "samples", "time"]),
    default="steps",
    show_default=True,
    help="Quantity on the x axis.",
)
@click.option("--log", "is_log", is_flag=True, help="Use a logarithmic loss axis.")
def plot(runs: tuple[Path, ...], out: Path, over: str, is_log: bool) -> None:
    """Draw the training and validation losses of runs.

    Needs matplotlib: pip install 'mpitrain[report]'.
    """
    from mpitrain.files import cannot_write
    from mpitrain.plots import check_drawable
    from mpitrain.run.run_dir import metrics_of
    from mpitrain.tools.bench.plot_loss import draw

    check_drawable(out, "--out")
    metrics = {str(run): metrics_of(run) for run in runs}
    try:
        draw(metrics, over, is_log, out)
    except OSError as error:
        raise cannot_write(out, error) from None
    click.echo(f"{len(runs)} run(s) drawn in {out}")


@click.command("metrics", cls=RootCommand)
@click.argument("runs", metavar="RUN [RUN ...]", nargs=-1, required=True, type=RUN)
@click.option(
    "--csv",
    "is_csv",
    is_flag=True,
    help="Print comma-separated values with all series, for pandas or a spreadsheet.",
)
def metrics(runs: tuple[Path, ...], is_csv: bool) -> None:
    """Print losses, learning rate, speed and evaluations of runs, a line for each logged step.

    A run that is still going on is shown up to its last line of metrics.jsonl.
    """
    from mpitrain.run.metrics import joined
    from mpitrain.run.run_dir import metrics_of
    from mpitrain.tools.report.metrics_table import print_columns, write_csv

    rows = [row for run in runs for row in joined(str(run), metrics_of(run))]
    (write_csv if is_csv else print_columns)(rows, sys.stdout)


@click.command("checkpoints", cls=RootCommand)
@click.argument("run", metavar="RUN", type=RUN)
@click.option(
    "--verify",
    "does_verify",
    is_flag=True,
    help="Read all files, and compare them with their SHA-256; exit with 1 if one is damaged or cannot be read.",
)
def checkpoints(run: Path, does_verify: bool) -> None:
    """List the checkpoints of a run: step, size, seconds that the save took, validation loss."""
    from mpitrain.run.run_dir import checkpoints_of
    from mpitrain.tools.text_table import TextColumn, TextTable

    rows = checkpoints_of(run, does_verify)
    table = TextTable(
        [
            TextColumn("step", "8d", "step"),
            TextColumn("MB", "10.1f", lambda row: row.nbytes / 1e6),
            TextColumn("saved in s", "10.2f", "seconds"),
            TextColumn("MB/s", "8.1f", lambda row: row.nbytes / row.seconds / 1e6),
            TextColumn("val. loss", "10.4f", "val_loss"),
            TextColumn("", "<28", "note", gap=2),
        ]
    )
    problems = [row.problem for row in rows if row.problem]
    show([*table.lines(rows), *problems])
    sys.exit(DAMAGED if problems else 0)


DAMAGED, DIFFERENT = 1, 1
"""Exit codes of a run with a damaged checkpoint, and of two runs that differ."""


@click.command("diff", cls=RootCommand)
@click.argument("first", metavar="RUN", type=RUN)
@click.argument("second", metavar="RUN", type=RUN)
@click.option(
    "--replay",
    "does_replay",
    is_flag=True,
    help="Repeat both runs from their nearest equal checkpoint, and name the first tensor that differs.",
)
@PLUGINS
def diff(first: Path, second: Path, does_replay: bool, plugins: list[str] | None) -> None:
    """Find the first step at which two runs differ, and exit with 1 if they do.

    Configuration keys that differ are printed first. Runs of one layout are compared bit for bit:
    losses, gradient norms, checkpoints, and the digests of run.digest_every. --replay repeats their
    steps, with ranks as threads of this process. Runs of two layouts are compared within a
    tolerance: losses, gradient norms, and a few sums over each parameter tensor.
    """
    process.limit_blas_threads()
    from mpitrain.config.plugins import load
    from mpitrain.tools.report.diff import are_comparable_by_bits, keys_that_differ, read_run

    load({"run": {"plugins": plugins or []}})
    both = read_run(first), read_run(second)
    show(keys_that_differ(*both))
    is_by_bits = are_comparable_by_bits(*both)
    if not is_by_bits and does_replay:
        from mpitrain.errors import ConfigError

        raise ConfigError(
            "--replay needs two runs of one layout, but these runs have different layouts.",
            "Leave out --replay.",
        )
    is_equal = _by_bits(both, does_replay) if is_by_bits else _by_numbers(both)
    sys.exit(0 if is_equal else DIFFERENT)


def show(lines: "Iterable[str]") -> None:
    """Print lines with control characters made visible: another person's files may have some in
    names.
    """
    from mpitrain.errors import visible

    click.echo("\n".join(map(visible, lines)))


def _by_bits(both: "tuple[ComparedRun, ComparedRun]", does_replay: bool) -> bool:
    """Print how two runs of one layout differ; return whether they are equal."""
    from mpitrain.cli.terminal.progress import bar
    from mpitrain.tools.report.diff import compare_bits, lines_of_bits, start_of_replay
    from mpitrain.tools.report.replay import replay, replayed

    comparison = compare_bits(*both)
    show(lines_of_bits(comparison, *both))
    if comparison.first is None:
        return True
    if does_replay:
        start = start_of_replay(comparison.first, *both)
        last = max(start + 1, comparison.first)
        with closing(bar(last - start)) as shown:
            result = replay(both, start, last, lambda step: shown.update() and None)
        show(replayed(result, both))
    return False


def _by_numbers(both: "tuple[ComparedRun, ComparedRun]") -> bool:
    """Print how two runs of different layouts differ; return whether they agree."""
    from mpitrain.tools.report.diff import compare_numbers, lines_of_numbers, tolerance

    limit = tolerance(both[0].config)
    logged, compared = compare_numbers(*both, limit)
    show(lines_of_numbers(limit, logged, compared))
    return logged is None and not any(beyond for _, beyond, _ in compared)
