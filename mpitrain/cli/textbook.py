"""`mpitrain learn`: its commands `explain`, `claims`, `exercise` and `check`."""

import json
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from mpitrain.cli.job_options import Outputs, check_files, language_option, output_option
from mpitrain.cli.terminal.output import columns, output_columns
from mpitrain.errors import ConfigError, visible
from mpitrain.files import check_writable, write_whole
from mpitrain.machine import process
from mpitrain.tools.words import text, to_fit

LANGUAGE = language_option(is_passed=True)

NARROWEST = 80
"""Minimum width of a table, in columns."""
TYPED = re.compile(r"[$:] mpitrain ")
"""A command, which stays whole, so that it can be copied."""


def _show(lines: Iterable[str]) -> None:
    """Print lines; a terminal gets sentences that are wrapped between words."""
    room = output_columns()
    for line in lines:
        click.echo("\n".join([line] if TYPED.search(line) else to_fit(line, room)))


@click.command("explain")
@click.argument("topic", required=False)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    help="Number of ranks; each is a thread. Default: depends on the topic.",
)
@click.option("--step", "waits", is_flag=True, help="Wait for Enter after each frame.")
@output_option(
    "--png", "Draw pictures of 1280 x 720: NAME-1.png and so on. Needs mpitrain[report]."
)
@output_option(
    "--html",
    "Write an HTML page with a slider. Without a TOPIC: write a folder with a page for each topic.",
)
@click.option(
    "--link",
    metavar="SPEED,LATENCY",
    help="Slow down the links between the threads, e.g. 200Mbit,1ms. Needs no root.",
)
@click.option(
    "--alone",
    "is_alone",
    is_flag=True,
    help="For column and row: one such layer between layers that are not divided.",
)
@LANGUAGE
def explain(
    topic: str | None,
    ranks: int | None,
    waits: bool,
    png_file: Path | None,
    html_file: Path | None,
    link: str | None,
    is_alone: bool,
    language: str,
) -> None:
    """Show how a method works: its real code runs on threads, with symbols as data.

    Each frame shows the buffers of all ranks after a step. The last lines are the bytes sent, their
    formula, and the source lines that ran. Without a TOPIC, list all topics.
    """
    if process.launched().rank > 0:
        return  # only rank 0 prints
    from mpitrain.tools.textbook.explain import terminal
    from mpitrain.tools.textbook.explain.links import parse_link
    from mpitrain.tools.textbook.explain.topics import PARTS, TOPICS
    from mpitrain.tools.textbook.learn import row_of

    speed = parse_link(link) if link is not None else None
    if topic is None:
        if png_file or waits or ranks or link or is_alone:
            raise ConfigError(
                "--ranks, --step, --png, --link and --alone need a topic, but none is given.",
                f"Name one of {', '.join(TOPICS)}.",
            )
        if html_file:
            _write_all(html_file, language)
            return
        click.echo("\n".join(terminal.listing(TOPICS, PARTS, language)))
        return
    if is_alone:
        if f"{topic}-alone" not in TOPICS:
            raise ConfigError(
                f"--alone is for the topics column and row, but this is {topic!r}.",
                "Leave out --alone.",
            )
        topic += "-alone"
    row = row_of(TOPICS, "topic", topic)
    setting = row.setting(topic, ranks, speed)
    check_files(0, [html_file])
    if html_file and html_file.suffix not in (".html", ".htm"):
        raise ConfigError(
            f"The page of a topic ends in .html, but this is {html_file}.",
            f"Name it {html_file}.html, or leave out the topic for a folder with all pages.",
        )
    if png_file:
        from mpitrain.plots import check_drawable

        check_drawable(png_file, "--png")
    explanation = row.explained(setting)
    if not (png_file or html_file) or waits:
        _show(terminal.heading(explanation, language))
        shown = terminal.frames(explanation, language, max(NARROWEST, columns(1)))
        for number, lines in enumerate(shown):
            if number and waits and sys.stdin.isatty():
                # click.pause would take Ctrl-C as Enter.
                click.echo(text("Press Enter for the next step.", language), nl=False)
                sys.stdin.readline()
            click.echo("\n".join(lines))
        _show(terminal.ending(explanation, language))
    outputs = Outputs()
    if png_file:
        from mpitrain.tools.textbook.explain.picture import NO_HANGUL, draw_for_a_wall

        with outputs.to(png_file):
            drawn, files = draw_for_a_wall(explanation, png_file, language)
            for file in files:
                click.echo(text("drawn in {file}", language, file=file))
            if drawn != language:
                click.echo(text(NO_HANGUL, language))
    if html_file:
        from mpitrain.tools.textbook.explain.page import write

        with outputs.to(html_file):
            write(explanation, html_file, language)
            click.echo(text("written to {file}", language, file=html_file))
    outputs.settle()


def _write_all(folder: Path, language: str) -> None:
    from mpitrain.cli.terminal.progress import bar
    from mpitrain.tools.textbook.explain.page import write_all
    from mpitrain.tools.textbook.explain.topics import TOPICS

    missing = [name for name, topic in TOPICS.items() if not topic.runs_here]
    with bar(len(TOPICS) - len(missing)) as shown:
        for name in write_all(folder, language):
            shown.set_postfix_str(name, refresh=False)
            shown.update()
    if missing:
        click.echo(text("left out without g++ or zig: {names}", language, names=", ".join(missing)))
    click.echo(text("written to {file}", language, file=folder / "index.html"))


@click.command("claims")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--list", "lists", is_flag=True, help="Print names and sentences, and measure nothing."
)
@output_option("--html", "Write the claims to this page, which needs no other file.")
@output_option("--json", "Write the claims and their numbers to this file.")
@LANGUAGE
def claims(
    names: tuple[str, ...],
    lists: bool,
    html_file: Path | None,
    json_file: Path | None,
    language: str,
) -> int:
    """Measure sentences of textbooks, and print in which settings they are true.

    Without a NAME it measures all claims, in about a minute. Each claim is an experiment with this
    package: it simulates schedules, counts the bytes that ranks send, or counts memory. The verdict
    is for the settings to which the sentence refers. The lines below "elsewhere" show another
    setting, in which the opposite is true. The exit code is 1 if a claim cannot be measured.
    """
    if process.launched().rank > 0:
        return 0  # only rank 0 prints
    process.limit_blas_threads()
    from mpitrain.machine.compiling import has_compiler
    from mpitrain.tools.textbook.claims.claim import judge
    from mpitrain.tools.textbook.claims.report import lines, page, record, summary
    from mpitrain.tools.textbook.claims.table import CLAIMS
    from mpitrain.tools.textbook.learn import row_of

    for name in names:
        row_of(CLAIMS, "claim", name)
    if lists:
        for name in names or CLAIMS:
            click.echo(f"{name:24}{text(CLAIMS[name].sentence, language)}")
        return 0
    check_files(0, [html_file, json_file])
    judged, missing, failed = [], list[str](), list[str]()
    for name in dict.fromkeys(names or CLAIMS):
        if CLAIMS[name].compiled and not has_compiler():
            missing.append(name)
            continue
        try:
            judged.append(judge(name, CLAIMS[name]))
        except Exception as error:  # The other claims and the files do not depend on this one.
            failed.append(name)
            reason = visible(f"{type(error).__name__}: {error}")
            click.echo(text("not measured: {name}: {reason}", language, name=name, reason=reason))
            continue
        _show([*lines(judged[-1], language), ""])
    click.echo(summary(judged, language))
    if missing:
        click.echo(text("left out without g++ or zig: {names}", language, names=", ".join(missing)))
    outputs = Outputs()
    if html_file:
        with outputs.to(html_file):
            write_whole(html_file, page(judged, language))
    if json_file:
        with outputs.to(json_file):
            records = [record(claim, language) for claim in judged]
            write_whole(json_file, json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    outputs.settle()
    return 1 if failed else 0


@click.command("exercise")
@click.argument("name", required=False)
@output_option("--out", "Write the skeleton to this new file. Default: print it.")
@LANGUAGE
def exercise(name: str | None, out_file: Path | None, language: str) -> None:
    """Write the skeleton of an exercise: a statement, and a function to complete.

    Without a NAME, list all exercises.

    Each task differs from this package's own code. `mpitrain learn check FILE` checks a solution.
    """
    if process.launched().rank > 0:
        return  # only rank 0 prints
    from mpitrain.tools.textbook.exercises.check import skeleton
    from mpitrain.tools.textbook.exercises.table import EXERCISES
    from mpitrain.tools.textbook.learn import row_of

    if name is None:
        for each, row in EXERCISES.items():
            click.echo(f"{each:8}{text(row.statement, language).splitlines()[0]}")
        return
    written = skeleton(name, row_of(EXERCISES, "exercise", name), language)
    if out_file is None:
        click.echo(written, nl=False)
        return
    if out_file.exists():
        raise ConfigError(
            f"A skeleton is a new file, but {out_file} is there already.", "Name another --out."
        )
    check_writable(out_file)
    write_whole(out_file, written)
    click.echo(shlex.join(["mpitrain", "learn", "check", str(out_file)]))


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
@LANGUAGE
def check(path: Path, csv_file: Path | None, language: str) -> int:
    """Check the solution of an exercise, or all Python files of a folder.

    The code runs in a separate process, with limits on time and memory. The exit code is 1 if the
    solution is wrong. For a folder it is 0 after all files are checked.
    """
    if process.launched().rank > 0:
        return 0  # only rank 0 prints
    from mpitrain.tools.textbook.exercises.check import check_file, lines, row, table

    is_printed = csv_file == PRINTED
    check_files(0, [None if is_printed else csv_file])
    if not path.is_dir():
        if csv_file:
            raise ConfigError(
                f"--csv is for a folder of solutions, but {path} is no folder.",
                "Leave out --csv, or name the folder.",
            )
        checked = check_file(path)
        _show(lines(str(path), checked, language))
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
            checked = check_file(file)
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
