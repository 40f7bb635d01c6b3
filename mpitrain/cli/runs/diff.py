"""`mpitrain runs diff`: names the first step and tensor at which two runs differ."""

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpitrain.cli.job_options import PLUGINS
from mpitrain.machine import process

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpitrain.tools.report.diff.sides import ComparedRun


DIFFERENT = 1
"""Exit code of two runs that differ."""


@click.command()
@click.argument("first", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("second", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--replay",
    "does_replay",
    is_flag=True,
    help="Repeat both runs from their nearest equal checkpoint, and name the first tensor that differs.",
)
@PLUGINS
def command(first: Path, second: Path, does_replay: bool, plugins: list[str] | None) -> None:
    """Find the first step at which two runs differ, and exit with 1 if they do.

    Configuration keys that differ are printed first. Runs of one layout are compared bit for bit:
    losses, gradient norms, checkpoints, and the digests of run.digest_every. --replay repeats their
    steps, with ranks as threads of this process. Runs of two layouts are compared within a
    tolerance: losses, gradient norms, and a few sums over each parameter tensor.
    """
    if process.launched().rank > 0:
        return  # only rank 0 compares
    process.limit_blas_threads()
    from mpitrain.config.plugins import load
    from mpitrain.tools.report.diff import sides

    load({"run": {"plugins": plugins or []}})
    both = sides.read(first), sides.read(second)
    changed = sides.changed_keys(*both)
    from mpitrain.tools.report.diff import text

    show(text.keys_that_differ(changed))
    is_by_bits = sides.are_comparable_by_bits(*both)
    if not is_by_bits and does_replay:
        from mpitrain.errors import ConfigError

        raise ConfigError(
            "--replay needs two runs of one layout, but these runs have different layouts.",
            "Leave out --replay.",
        )
    is_equal = _by_bits(both, does_replay) if is_by_bits else _by_numbers(both)
    sys.exit(0 if is_equal else DIFFERENT)


def show(lines: "Iterable[str]") -> None:
    """Print lines; names from the files of another person may have control characters."""
    from mpitrain.errors import visible

    click.echo("\n".join(map(visible, lines)))


def _by_bits(both: "tuple[ComparedRun, ComparedRun]", does_replay: bool) -> bool:
    """Print how two runs of one layout compare; return whether they are equal."""
    from mpitrain.cli.terminal.progress import bar
    from mpitrain.tools.report.diff import series, text
    from mpitrain.tools.report.diff.replay import replay

    comparison = series.compare_bits(*both)
    show(text.bits(comparison, *both))
    if comparison.first is None:
        return True
    if does_replay:
        start = series.start_of_replay(comparison.first, *both)
        last = max(start + 1, comparison.first)
        with closing(bar(last - start)) as shown:
            result = replay(both, start, last, lambda step: shown.update() and None)
        show(text.replayed(result, both))
    return False


def _by_numbers(both: "tuple[ComparedRun, ComparedRun]") -> bool:
    """Print how two runs of different layouts compare; return whether they agree."""
    from mpitrain.tools.report.diff import series, text

    limit = series.tolerance(both[0].config)
    logged, compared = series.compare_numbers(*both, limit)
    show(text.numbers(limit, logged, compared))
    return logged is None and not any(beyond for _, beyond, _ in compared)
