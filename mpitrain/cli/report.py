"""`mpitrain runs report`: where the time of runs went, and the last known action of each rank."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpitrain.cli import RootCommand
from mpitrain.cli.job_options import Outputs, in_words, language_option, say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from mpitrain.tools.report.pictures import PageSection
    from mpitrain.trace.timeline import Timeline

    Drawn = tuple[Timeline, range | None]

FOLDER, PAGE, PERFETTO = "report", "report.html", "perfetto.json"
PICTURES = "timeline, picture or page"
TIMELINE, METRICS_PICTURE = "timeline.png", "metrics.png"


@click.command(cls=RootCommand)
@click.argument(
    "runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN [RUN ...]"
)
@click.option(
    "--now",
    "is_alive",
    is_flag=True,
    help="Ask a running job, through files in RUN: print the rank that the others wait for, and "
    "the last action of each rank. Needs no MPI; works on a login node, too.",
)
@click.option(
    "--stacks", "with_stacks", is_flag=True, help="With --now: print the Python stacks, too."
)
@language_option(is_passed=False)
def command(runs: tuple[Path, ...], is_alive: bool, with_stacks: bool) -> None:
    """Print where the time of runs went, from the traces of their ranks.

    If a run crashed or was killed, print the last known action of each rank. With --now,
    print the state of a run in progress.

    The timeline of all ranks is written to RUN/report, as a picture and as a trace for Perfetto or
    Chrome. The first RUN's report also gets an HTML page with everything. The pictures and the
    page need matplotlib: pip install 'mpitrain[report]'.
    """
    if is_alive or with_stacks:
        _print_now(runs, is_alive, with_stacks)
        return
    outputs = Outputs()
    sections = {str(run): reported(run, outputs) for run in runs}
    folder = runs[0] / FOLDER
    if sections[str(runs[0])].perfetto:
        say([f"{folder / PERFETTO} is for https://ui.perfetto.dev"])
    if find_spec("matplotlib") is None:
        say(["no pictures and no page: pip install 'mpitrain[report]'"])
    else:
        _write_page(runs, sections, outputs)
    outputs.settle()


def _print_now(runs: tuple[Path, ...], is_alive: bool, with_stacks: bool) -> None:
    from mpitrain.errors import ConfigError, visible
    from mpitrain.tools.report.text import what_happens_now

    if not is_alive:
        raise ConfigError(
            "--stacks prints stacks of a running job, but --now is missing.", "Add --now."
        )
    for run in runs:
        for line in what_happens_now(run, with_stacks):
            say([visible(f"{run}: {line}" if len(runs) > 1 else line)])


def _write_page(
    runs: "Sequence[Path]", sections: "Mapping[str, PageSection]", outputs: Outputs
) -> None:
    from mpitrain.files import own_folder
    from mpitrain.run.metrics import METRICS, read_metrics
    from mpitrain.tools.report.pictures import draw_metrics, write_page

    folder = runs[0] / FOLDER
    metrics = {str(run): read_metrics(run / METRICS) for run in runs}
    with outputs.to(folder, PICTURES):
        draw_metrics(metrics, own_folder(folder) / METRICS_PICTURE)
        write_page(folder / PAGE, sections, folder / METRICS_PICTURE)
        say([f"{folder / PAGE} has all of it, with pictures"])


def reported(run: Path, outputs: Outputs) -> "PageSection":
    """Print the summary of a run; write its Perfetto trace and, with matplotlib, its timeline.

    returns  the part of the HTML page about the run
    raises   ConfigError if the directory has no run
    """
    from mpitrain.config import CONFIG
    from mpitrain.errors import ConfigError, visible
    from mpitrain.files import own_folder
    from mpitrain.run.metrics import METRICS, read_metrics
    from mpitrain.tools.report.pictures import PageSection
    from mpitrain.tools.report.text import goodput, how_it_ended
    from mpitrain.trace.startup import left
    from mpitrain.trace.timeline import TRACE, trace_files

    try:
        names = os.listdir(run)
    except FileNotFoundError:
        names = []
    is_early = any(name.startswith("rank-") for name in names)
    records = read_metrics(run / METRICS)
    if not records and not is_early and CONFIG not in names and TRACE not in names:
        starts = ", ".join(map(str, left()[-3:]))
        traces = f" Starts on this host that failed before they had one left traces in {starts}."
        way_out = "Name the directory of a run." + traces * bool(starts)
        raise ConfigError(f"There is no run in {run}.", way_out)
    lines = [f"{run}: {'It had no run directory yet.' if is_early else how_it_ended(records)}"]
    lines += goodput(records)
    drawn: Drawn | None = None
    if is_early or (TRACE in names and trace_files(run)[1]):
        traced, drawn = _traced(run, records)
        lines += traced
    else:
        lines.append("It has no trace: run.trace, which is the default, keeps one.")
    words = visible(in_words(lines))
    click.echo(words)
    with outputs.to(run / FOLDER, PICTURES):
        own_folder(run / FOLDER)
        return PageSection(words, *(_draw(run, drawn) if drawn else (None, None)))
    return PageSection(words, None, None)


def _traced(run: Path, records: "Sequence[Mapping[str, Any]]") -> "tuple[list[str], Drawn]":
    """Return the summary lines of a run's traces; then the timeline, and the steps of it to draw."""
    from mpitrain.run.metrics import CLOSING
    from mpitrain.tools.report.schedule_comparison import what_was_predicted
    from mpitrain.tools.report.text import (
        what_each_did_last,
        where_the_time_went,
        whose_traces_are_missing,
    )
    from mpitrain.tools.report.time_breakdown import shares
    from mpitrain.trace.timeline import read_timeline

    timeline = read_timeline(run)
    lines = list(whose_traces_are_missing(timeline))
    breakdown = shares(timeline)
    if breakdown:
        lines += [
            *where_the_time_went(breakdown, timeline),
            *what_was_predicted(run, timeline, breakdown.steps),
        ]
    elif timeline.missing:
        lines.append(
            "Where the time went cannot be said without the traces of all ranks, for they wait for each other."
        )
    else:
        lines.append("No step was finished by all ranks.")
    if not records or records[-1].get("event") not in CLOSING:
        lines += what_each_did_last(timeline)
    return lines, (timeline, breakdown.steps if breakdown else None)


def _draw(run: Path, drawn: "Drawn") -> tuple[Path | None, Path]:
    """Write the Perfetto trace and, with matplotlib, a timeline of the completed steps.

    returns  the path of the picture, or None; the path of the trace
    """
    from mpitrain.tools.report.pictures import write_perfetto

    timeline, steps = drawn
    picture, perfetto = run / FOLDER / TIMELINE, run / FOLDER / PERFETTO
    write_perfetto(perfetto, timeline)
    if steps is None or not find_spec("matplotlib"):
        return None, perfetto
    from mpitrain.tools.report.pictures import draw_timeline

    draw_timeline(str(run), timeline, steps, picture)
    return picture, perfetto
