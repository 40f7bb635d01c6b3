"""`mpitrain learn claims`: measures textbook sentences, and prints in which settings they are true."""

from pathlib import Path

import click

from mpitrain.cli.job_options import Outputs, check_files, output_option
from mpitrain.cli.language import language_option
from mpitrain.machine import process


@click.command("claims")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--list", "lists", is_flag=True, help="Print names and sentences, and measure nothing."
)
@output_option("--html", "Write the claims to this page, which needs no other file.")
@output_option("--json", "Write the claims and their numbers to this file.")
@language_option
def command(
    names: tuple[str, ...],
    lists: bool,
    html_file: Path | None,
    json_file: Path | None,
    language: str,
) -> None:
    """Measure sentences of textbooks, and print in which settings they are true.

    Without a NAME it measures all claims, in about a minute. Each claim is an experiment with this
    package: it simulates schedules, counts the bytes that ranks send, or counts memory. The verdict
    is for the settings to which the sentence refers. The lines below "elsewhere" show another
    setting, in which the opposite is true.
    """
    if process.launched().rank > 0:
        return  # only rank 0 prints
    process.limit_blas_threads()
    from mpitrain.errors import ConfigError
    from mpitrain.files import write_whole
    from mpitrain.machine.devices import has_compiler
    from mpitrain.tools.textbook.claims.claim import judge
    from mpitrain.tools.textbook.claims.page import page
    from mpitrain.tools.textbook.claims.table import CLAIMS
    from mpitrain.tools.textbook.claims.text import lines, record, summary
    from mpitrain.tools.textbook.words import text

    for name in names:
        if name not in CLAIMS:
            raise ConfigError(
                f"There are {len(CLAIMS)} claims, but none has the name {name!r}.",
                "`mpitrain learn claims --list` prints their names and sentences.",
            )
    if lists:
        for name in names or CLAIMS:
            click.echo(f"{name:24}{text(CLAIMS[name].sentence, language)}")
        return
    check_files(0, [html_file, json_file])
    judged = []
    missing = [name for name in CLAIMS if CLAIMS[name].compiled and not has_compiler()]
    for name in dict.fromkeys(names or [name for name in CLAIMS if name not in missing]):
        judged.append(judge(name, CLAIMS[name]))
        click.echo("\n".join([*lines(judged[-1], language), ""]))
    click.echo(summary(judged, language))
    if missing and not names:
        click.echo(text("left out without g++ or zig: {names}", language, names=", ".join(missing)))
    outputs = Outputs()
    if html_file:
        with outputs.to(html_file):
            write_whole(html_file, page(judged, language))
    if json_file:
        import json

        with outputs.to(json_file):
            records = [record(claim, language) for claim in judged]
            write_whole(json_file, json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    outputs.settle()
