"""`mpitrain learn check`: prints whether solutions of exercises are right, or why they are wrong."""

from pathlib import Path

import click

from mpitrain.cli.job_options import Outputs, check_files
from mpitrain.cli.language import language_option
from mpitrain.machine import process

PRINTED = Path("-")
"""The value of --csv without a file."""


@click.command("check")
@click.argument("path", metavar="FILE|DIR", type=click.Path(path_type=Path))
@click.option(
    "--csv",
    "csv_file",
    is_flag=False,
    flag_value=str(PRINTED),
    metavar="[FILE]",
    type=click.Path(path_type=Path),
    help="Write a row for each file of DIR to this file. Without a FILE, print only these rows.",
)
@language_option
def command(path: Path, csv_file: Path | None, language: str) -> int:
    """Check the solution of an exercise, or all Python files of a folder.

    The code runs in a separate process, with limits on time and memory. The exit code is 1 if the
    solution is wrong. For a folder it is 0 after all files are checked.
    """
    if process.launched().rank > 0:
        return 0  # only rank 0 prints
    from mpitrain.errors import ConfigError, visible
    from mpitrain.files import write_whole
    from mpitrain.tools.textbook.exercises.check import check
    from mpitrain.tools.textbook.exercises.report import lines, row, table
    from mpitrain.tools.textbook.words import text

    is_printed = csv_file == PRINTED
    check_files(0, [None if is_printed else csv_file])
    if not path.is_dir():
        if csv_file:
            raise ConfigError(
                f"--csv is for a folder of solutions, but {path} is no folder.",
                "Leave out --csv, or name the folder.",
            )
        checked = check(path)
        click.echo("\n".join(lines(str(path), checked, language)))
        return 0 if checked.is_right else 1
    files = sorted(path.glob("*.py"))
    if not files:
        raise ConfigError(
            f"A class has a Python file for each student, but {path} has none.",
            "Name a folder of files that `mpitrain learn exercise` wrote.",
        )
    rows, right = [], 0

    def say(line: str) -> None:
        if not is_printed:
            click.echo(line)

    for file in files:
        try:
            checked = check(file)
        except ConfigError as error:
            say(visible(f"{file.name}: {error.law}"))
            rows.append([file.name, "", "wrong", "", "", error.law, "", ""])
            continue
        say("\n".join(lines(file.name, checked, language)))
        rows.append(row(file.name, checked, language))
        right += checked.is_right
    say(text("{right} of {files} files are right", language, right=right, files=len(files)))
    outputs = Outputs()
    if is_printed:
        click.echo(table(rows), nl=False)
    elif csv_file:
        with outputs.to(csv_file):
            write_whole(csv_file, table(rows))
    outputs.settle()
    return 0
