"""`mpitrain learn explain`: shows how a method works, on real messages between threads."""

import sys
from pathlib import Path

import click

from mpitrain.cli.job_options import Outputs, check_files
from mpitrain.cli.language import language_option
from mpitrain.cli.terminal.output import columns
from mpitrain.machine import process

NARROWEST = 80
"""Minimum width of a table, in columns."""


@click.command()
@click.argument("topic", required=False)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    help="Number of ranks; each is a thread. Default: depends on the topic.",
)
@click.option("--step", "waits", is_flag=True, help="Wait for Enter after each frame.")
@click.option(
    "--png",
    "picture",
    type=click.Path(path_type=Path),
    help="Draw the frames. Needs mpitrain[report].",
)
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path),
    help="Write an HTML page with a slider. Without a TOPIC: write a folder with a page for each topic.",
)
@click.option(
    "--link",
    metavar="SPEED,LATENCY",
    help="Slow down the links between the threads, e.g. 200Mbit,1ms. Needs no root.",
)
@language_option
def command(
    topic: str | None,
    ranks: int | None,
    waits: bool,
    picture: Path | None,
    page: Path | None,
    link: str | None,
    language: str,
) -> None:
    """Show how a method works: its real code runs on threads, with symbols as data.

    Each frame shows the buffers of all ranks after a step. The last lines are the bytes sent, their
    formula, and the source lines that ran. Without a TOPIC, list all topics.
    """
    if process.launched().rank > 0:
        return  # only rank 0 prints
    from mpitrain.errors import ConfigError
    from mpitrain.tools.textbook.explain import terminal
    from mpitrain.tools.textbook.explain.links import parse_link
    from mpitrain.tools.textbook.explain.topics import TOPICS
    from mpitrain.tools.textbook.words import text

    speed = parse_link(link) if link is not None else None
    if topic is None:
        if picture or waits or ranks or link:
            raise ConfigError(
                "--ranks, --step, --png and --link need a topic, but none is given.",
                f"Name one of {', '.join(TOPICS)}.",
            )
        if page:
            _write_all(page, language)
            return
        click.echo("\n".join(terminal.listing(TOPICS, language)))
        return
    if topic not in TOPICS:
        raise ConfigError(
            f"A topic is one of {', '.join(TOPICS)}, but this is {topic!r}.",
            "Run `mpitrain learn explain` for a list.",
        )
    row = TOPICS[topic]
    setting = row.setting(topic, ranks, speed)
    check_files(0, [page])
    if picture:
        from mpitrain.plots import check_drawable

        check_drawable(picture, "--png")
    explanation = row.explained(setting)
    if not (picture or page) or waits:
        click.echo("\n".join(terminal.heading(explanation, language)))
        shown = terminal.frames(explanation, language, max(NARROWEST, columns(1)))
        for number, lines in enumerate(shown):
            if number and waits and sys.stdin.isatty():
                # click.pause would take Ctrl-C as Enter.
                click.echo(text("Press Enter for the next step.", language), nl=False)
                sys.stdin.readline()
            click.echo("\n".join(lines))
        click.echo("\n".join(terminal.ending(explanation, language)))
    outputs = Outputs()
    if picture:
        from mpitrain.tools.textbook.explain.picture import draw

        with outputs.to(picture):
            draw(explanation, picture, language)
            click.echo(text("drawn in {file}", language, file=picture))
    if page:
        from mpitrain.tools.textbook.explain.page import write

        with outputs.to(page):
            write(explanation, page, language)
            click.echo(text("written to {file}", language, file=page))
    outputs.settle()


def _write_all(folder: Path, language: str) -> None:
    from mpitrain.cli.terminal.progress import bar
    from mpitrain.tools.textbook.explain.page import write_all
    from mpitrain.tools.textbook.explain.topics import TOPICS
    from mpitrain.tools.textbook.words import text

    missing = [name for name, topic in TOPICS.items() if not topic.runs_here]
    with bar(len(TOPICS) - len(missing)) as shown:
        for name in write_all(folder, language):
            shown.set_postfix_str(name, refresh=False)
            shown.update()
    if missing:
        click.echo(text("left out without g++ or zig: {names}", language, names=", ".join(missing)))
    click.echo(text("written to {file}", language, file=folder / "index.html"))
