"""`mpitrain report`: where the time of runs went, and what each rank did last."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpitrain.machine import process

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from mpitrain.report.page import Section

FOLDER, PAGE, TIMELINE, METRICS_PICTURE, PERFETTO = "report", "report.html", "timeline.png", "metrics.png", "perfetto.json"


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN [RUN ...]")
def command(runs: tuple[Path, ...]) -> None:
    """Say where the time of runs went, by what their ranks noted last; of a run that died, what each rank did.

    Each RUN/report gets the timeline of all ranks as a picture and as a trace for Perfetto or Chrome, and that of the first RUN
    a page of HTML with everything. Pictures and page need matplotlib: pip install 'mpitrain[report]'.
    """
    from mpitrain.run.folder import METRICS
    from mpitrain.run.metrics import read_metrics

    if process.launched().rank > 0:
        return  # rank 0 reports for all
    sections = {str(run): reported(run) for run in runs}
    folder = runs[0] / FOLDER
    if (folder / PERFETTO).exists():
        click.echo(f"{folder / PERFETTO} is for https://ui.perfetto.dev")
    if find_spec("matplotlib") is None:
        click.echo("no pictures and no page: pip install 'mpitrain[report]'")
        return
    from mpitrain.report.page import write_page
    from mpitrain.report.picture import draw_metrics

    draw_metrics({str(run): read_metrics(run / METRICS) for run in runs}, folder / METRICS_PICTURE)
    write_page(folder / PAGE, sections, folder / METRICS_PICTURE)
    click.echo(f"{folder / PAGE} has all of it, with pictures")


def reported(run: Path) -> "Section":
    """Say what the traces of a run say, and write what Perfetto reads and, with matplotlib, the timeline."""
    from mpitrain.errors import ConfigError
    from mpitrain.report.page import Section
    from mpitrain.report.words import how_it_ended
    from mpitrain.run.folder import CONFIG, METRICS, TRACE
    from mpitrain.run.metrics import read_metrics
    from mpitrain.trace.early import left

    records, is_early = read_metrics(run / METRICS), any(run.glob("rank-*"))
    if not records and not is_early and not (run / CONFIG).exists() and not (run / TRACE).exists():
        starts = ", ".join(map(str, left()[-3:]))
        raise ConfigError(f"There is no run in {run}.", "Name the directory of a run" + (
            f", or that of a start which had none yet; on this host {starts}." if starts else "."))
    try:
        (run / FOLDER).mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{run} cannot be written: {error.strerror}.", "Copy the run to where you may write.") from None
    lines, picture = [f"{run}: {'It had no run directory yet.' if is_early else how_it_ended(records)}"], None
    if is_early or any((run / TRACE).glob("*")):
        traced, picture = _traced(run, records)
        lines += traced
    else:
        lines.append("It has no trace: run.trace, which is the default, keeps one.")
    click.echo("\n".join(lines))
    perfetto = run / FOLDER / PERFETTO
    return Section("\n".join(lines), picture, perfetto if perfetto.exists() else None)


def _traced(run: Path, records: "Sequence[Mapping[str, Any]]") -> tuple[list[str], Path | None]:
    """Lines on what the traces of a run say, and the picture of its timeline, if there is one."""
    from mpitrain.report.perfetto import write_perfetto
    from mpitrain.report.predicted import what_was_predicted
    from mpitrain.report.shares import shares
    from mpitrain.report.timeline import read_timeline
    from mpitrain.report.words import (
        what_each_did_last,
        what_the_trace_cost,
        where_the_time_went,
        whose_traces_are_missing,
    )
    from mpitrain.run.metrics import CLOSING

    timeline, picture = read_timeline(run), None
    lines = list(whose_traces_are_missing(timeline))
    write_perfetto(run / FOLDER / PERFETTO, timeline)
    found = shares(timeline)
    if found:
        lines += [*where_the_time_went(found, timeline), *what_was_predicted(run, timeline, found.steps),
                  what_the_trace_cost(found, timeline)]
        if find_spec("matplotlib"):
            from mpitrain.report.picture import draw_timeline

            picture = run / FOLDER / TIMELINE
            draw_timeline(str(run), timeline, found.steps, picture)
    elif timeline.missing:
        lines.append("Where the time went cannot be said without the traces of all ranks, for they wait for each other.")
    else:
        lines.append("No step was finished by all ranks.")
    if not records or records[-1].get("event") not in CLOSING:
        lines += what_each_did_last(timeline)
    return lines, picture
