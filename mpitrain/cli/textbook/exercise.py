"""`mpitrain learn exercise`: writes the file with which a student begins."""

import shlex
from pathlib import Path

import click

from mpitrain.cli.language import language_option
from mpitrain.machine import process


@click.command("exercise")
@click.argument("name", metavar="ring|server|1f1b|column")
@click.option(
    "--out",
    "out_file",
    type=click.Path(path_type=Path),
    help="Write the skeleton to this new file. Default: print it.",
)
@language_option
def command(name: str, out_file: Path | None, language: str) -> None:
    """Write the skeleton of an exercise: a statement, and a function to complete.

    Each task differs from this package's own code. `mpitrain learn check FILE` checks a solution.
    """
    if process.launched().rank > 0:
        return  # only rank 0 prints
    from mpitrain.errors import ConfigError
    from mpitrain.files import check_writable, write_whole
    from mpitrain.tools.textbook.exercises.skeleton import skeleton
    from mpitrain.tools.textbook.exercises.table import EXERCISES

    if name not in EXERCISES:
        raise ConfigError(
            f"An exercise is one of {', '.join(EXERCISES)}, but this is {name!r}.",
            "Name one of these.",
        )
    written = skeleton(name, EXERCISES[name], language)
    if out_file is None:
        click.echo(written, nl=False)
        return
    if out_file.exists():
        raise ConfigError(
            f"A skeleton is a new file, but {out_file} is there already.",
            "Name another --out.",
        )
    check_writable(out_file)
    write_whole(out_file, written)
    click.echo(shlex.join(["mpitrain", "learn", "check", str(out_file)]))
