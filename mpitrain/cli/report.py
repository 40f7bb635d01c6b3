"""`mpitrain runs report`: where the time of runs went, and the last known action of each rank."""

import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpitrain.cli import RootCommand
from mpitrain.cli.job_options import Outputs, in_words, language_option, say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpitrain.tools.report.page import RunReport

FOLDER, PAGE, PERFETTO = "report", "report.html", "perfetto.json"


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
@click.option(
    "--watch",
    "follows",
    is_flag=True,
    help="Write the page again every few seconds until the runs have ended; it reads itself again in the browser.",
)
@language_option(is_passed=False)
def command(runs: tuple[Path, ...], is_alive: bool, with_stacks: bool, follows: bool) -> None:
    """Print where the time of runs went, from the traces of their ranks.

    If a run crashed or was killed, print the last known action of each rank. With --now,
    print the state of a run in progress.

    The timeline of all ranks is written to RUN/report as a trace for Perfetto or Chrome. The first
    RUN's report also gets an HTML page, which opens offline, with timelines to zoom and point at,
    curves and tables of all RUNs. The page needs Bokeh: pip install 'mpitrain[report]'.
    """
    if is_alive or with_stacks:
        _print_now(runs, is_alive, with_stacks)
        return
    has_page = find_spec("bokeh") is not None
    if follows and has_page:
        _follow(runs)
    outputs = Outputs()
    reports = {str(run): reported(run, outputs) for run in runs}
    folder = runs[0] / FOLDER
    if reports[str(runs[0])].perfetto:
        say([f"{folder / PERFETTO} is for https://ui.perfetto.dev"])
    if has_page:
        with outputs.to(folder, "page"):
            write(runs, reports)
            say([f"{folder / PAGE} has all of it: open it in a browser"])
    else:
        say(["no page: pip install 'mpitrain[report]'"])
    outputs.settle()


def write(
    runs: "Sequence[Path]", reports: "Mapping[str, RunReport]", follows: bool = False
) -> None:
    """Write the page of some runs into the report of the first."""
    from mpitrain.files import own_folder
    from mpitrain.tools.report.page import write_page

    write_page(own_folder(runs[0] / FOLDER) / PAGE, reports, follows)


def _follow(runs: "Sequence[Path]") -> None:
    """Write the page every few seconds, from the files of the runs, until all have ended."""
    from mpitrain.run.metrics import CLOSING
    from mpitrain.tools.report.page import AGAIN_S

    is_first = True
    while True:
        reports = {str(run): read_report(run)[0] for run in runs}
        ends = [
            report.records[-1].get("event") if report.records else "" for report in reports.values()
        ]
        if all(end in CLOSING for end in ends):
            return
        write(runs, reports, follows=True)
        if is_first:
            say([f"{runs[0] / FOLDER / PAGE} follows the run: open it in a browser; Ctrl-C ends"])
            is_first = False
        time.sleep(AGAIN_S)


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


def reported(run: Path, outputs: Outputs) -> "RunReport":
    """Print the summary of a run, and write its Perfetto trace.

    raises  ConfigError if the directory has no run
    """
    from mpitrain.errors import visible
    from mpitrain.files import own_folder

    report, lines = read_report(run)
    click.echo(visible(in_words(lines)))
    if report.timeline is None:
        return report
    with outputs.to(run / FOLDER, "timeline"):
        from mpitrain.tools.report.perfetto import write_perfetto

        write_perfetto(own_folder(run / FOLDER) / PERFETTO, report.timeline)
        return report._replace(perfetto=run / FOLDER / PERFETTO)
    return report


def read_report(run: Path) -> "tuple[RunReport, list[str]]":
    """Return the report of a run for the page, and the lines to print.

    raises  ConfigError if the directory has no run
    """
    from mpitrain.config import CONFIG
    from mpitrain.errors import ConfigError, visible
    from mpitrain.run.metrics import CLOSING, METRICS, read_metrics
    from mpitrain.tools.report.page import RunReport
    from mpitrain.tools.report.schedule_comparison import what_was_predicted
    from mpitrain.tools.report.text import (
        energy,
        experts,
        goodput,
        how_it_ended,
        losses,
        table_title,
        what_each_did_last,
        where_the_time_went,
        who_was_awaited,
        whose_traces_are_missing,
    )
    from mpitrain.tools.report.time_breakdown import shares
    from mpitrain.trace.startup import left
    from mpitrain.trace.timeline import TRACE, read_timeline, trace_files

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
    lines += [*goodput(records), *energy(records), *experts(records), *losses(records)]
    timeline = breakdown = None
    sentences = lines.copy()  # of the page, which has a table of its own
    if is_early or (TRACE in names and trace_files(run)[1]):
        timeline = read_timeline(run)
        more = [*whose_traces_are_missing(timeline)]
        breakdown = shares(timeline)
        if breakdown:
            predicted = [*what_was_predicted(run, timeline, breakdown.steps)]
            lines += [*more, *where_the_time_went(breakdown, timeline), *predicted]
            sentences += [*more, *who_was_awaited(breakdown, timeline), *predicted]
            more = []
        elif timeline.missing:
            more.append(
                "Where the time went cannot be said without the traces of all ranks, for they wait for each other."
            )
        else:
            more.append("No step was finished by all ranks.")
        if not records or records[-1].get("event") not in CLOSING:
            more += what_each_did_last(timeline)
    else:
        more = ["It has no trace: run.trace, which is the default, keeps one."]
    if breakdown and timeline:
        sentences.append(table_title(breakdown, timeline))
    shown = visible(in_words([*sentences, *more])).splitlines()
    return RunReport(shown, records, timeline, breakdown), [*lines, *more]
