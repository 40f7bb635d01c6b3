"""The files of a report: pictures of timeline and metrics, a trace for Perfetto, and an HTML page.

Pictures need matplotlib (the extra `report`). Perfetto (https://ui.perfetto.dev) and Chrome
(chrome://tracing) read Google's Trace Event Format: one object per event, times in microseconds.
"""

import base64
import html
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from mpitrain.errors import visible
from mpitrain.files import contents, write_whole
from mpitrain.plots import add_legend, legible, look, save, subplots, titled
from mpitrain.tools.bench.plot_loss import points
from mpitrain.trace.recorder import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    DEVICE,
    FORWARD,
    KINDS,
    PAUSE,
    RECEIVE,
    REDUCTION,
    SEND,
    STEP,
    WAIT,
)
from mpitrain.trace.timeline import Timeline, Trace, described, named_steps

FILLS = {
    "forward": "#56b4e9",
    "backward": "#e69f00",
    "input half": "#f0c060",
    "weight half": "#009e73",
    "other computing": "#8c8c8c",
    "standing still": "#ffffff",
    "evaluation, checkpoint": "#cc79a7",
}
BENEATH = {"messages": "#000000", "reductions": "#d55e00"}
OF_PHASE = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "input half",
    BACKWARD_WEIGHT: "weight half",
}
STEPS = 2
"""Number of steps that are drawn, the newest ones."""
CHARTS = {
    "loss": ("loss", "val_loss"),
    "learning rate": ("lr",),
    "tokens or samples per second": ("tokens_per_s", "samples_per_s"),
    "peak activations, MB": ("peak_activation_bytes",),
}


def draw_timeline(name: str, timeline: Timeline, steps: range, path: Path) -> None:
    """Draw the newest of `steps`, at most STEPS: one row per rank, time in ms on the x axis.

    The upper part of a row shows compute and waits (framed). The lower part shows pending messages
    and reductions.

    name  of the run
    """
    from matplotlib.patches import Patch

    shown, ranks = range(max(steps.start, steps.stop - STEPS), steps.stop), len(timeline.traces)
    windows = [timeline.window(rank, shown) for rank in range(ranks)]
    zero, last = min(start for start, _ in windows), max(end for _, end in windows)
    figure, axes = subplots()
    drawn: set[str] = set()
    for rank, trace in enumerate(timeline.traces):
        records = trace.records[(trace.records["end"] > zero) & (trace.records["start"] < last)]
        # Boxes with the same look are drawn together, because one by one takes long.
        bars: dict[tuple[str, float, float], list[tuple[float, float]]] = {}
        has_device = (records["kind"] == DEVICE).any()
        for record in records:
            if look := _look(record, has_device):
                bars.setdefault(look, []).append(
                    (1e3 * (record["start"] - zero), 1e3 * (record["end"] - record["start"]))
                )
        drawn |= {fill for fill, _, _ in bars}
        for (fill, place, height), spans in bars.items():
            is_wait = fill == FILLS["standing still"]
            # A layer may wait within its compute, so waits are drawn above it; a device never waits.
            above = (0.5 if has_device else 2) if is_wait else 1
            axes.broken_barh(
                spans,
                (rank + place, height),
                facecolors=fill,
                linewidth=0.4,
                zorder=above,
                edgecolors="black" if is_wait else "none",
            )
        spans = records[records["kind"] == (DEVICE if has_device else COMPUTE)]
        style = {"fontsize": "xx-small", "va": "center", "zorder": 3}
        for record in spans[(spans["phase"] == FORWARD) & (spans["unit"] == 0)]:
            axes.text(1e3 * (record["start"] - zero), rank, f" {record['micro']}", **style)
    axes.set(xlabel="ms", xlim=(0, 1e3 * (last - zero)), ylim=(ranks - 0.45, -0.5))
    axes.set_yticks(range(ranks), labels=[_row_name(trace) for trace in timeline.traces])
    axes.set_title(f"{legible(name)}, {named_steps(shown)}", fontsize="medium", parse_math=False)
    patches = [
        Patch(facecolor=fill, edgecolor="black", linewidth=0.4, label=what)
        for what, fill in (FILLS | BENEATH).items()
        if fill in drawn
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=4)
    save(figure, path)


def _look(record: Any, has_device: bool) -> tuple[str, float, float] | None:
    """Return the colour, vertical offset and height of a record, or None if it is not drawn.

    On a rank with a device, compute of the host is not drawn: the host only launches work.
    """
    kind = int(record["kind"])
    if kind == COMPUTE and has_device:
        return None
    if kind in (SEND, RECEIVE):
        return BENEATH["messages"], 0.3, 0.06
    if kind == REDUCTION:
        return BENEATH["reductions"], 0.38, 0.08
    if kind in (COMPUTE, DEVICE):
        return FILLS[OF_PHASE.get(int(record["phase"]), "other computing")], -0.3, 0.56
    fill = {WAIT: "standing still", PAUSE: "evaluation, checkpoint"}.get(kind)
    return (FILLS[fill], -0.3, 0.56) if fill else None


def _row_name(trace: Trace) -> str:
    place = trace.facts["place"]
    axes = " ".join(f"{axis}{place[axis]}" for axis in sorted(place)) if place else "server"
    return f"rank {trace.facts['rank']}: {axes}"


def draw_metrics(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw loss, learning rate, throughput and memory of runs over their steps.

    runs  {name of a run in the legend: records of its metrics.jsonl}
    """
    from matplotlib.ticker import MaxNLocator

    figure, views = subplots(2, 2)
    has_validation = False
    for axes, (title, fields) in zip(views.flat, CHARTS.items(), strict=True):
        for number, (name, records) in enumerate(runs.items()):
            colour, dash, mark = look(number)
            logged = [record for record in records if "event" not in record]
            drawn = next(filter(None, (points(logged, field, "steps") for field in fields)), [])
            unit = 1e6 if "bytes" in fields[0] else 1
            axes.plot(
                [step for step, _ in drawn],
                [value / unit for _, value in drawn],
                color=colour,
                linestyle=dash,
                label=legible(name) if drawn else None,
            )
            validated = points(records, "val_loss", "steps") if title == "loss" else []
            if validated:
                marks = zip(*validated, strict=True)
                axes.plot(*marks, mark, color=colour, markeredgecolor="black")
                has_validation = True
        axes.set(title=title, xlabel="step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if title != "loss":
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
    if has_validation:
        views[0, 0].plot([], [], "o", color="white", markeredgecolor="black", label="validation")
    if views[0, 0].get_legend_handles_labels()[0]:
        add_legend(figure, views[0, 0])
    figure.suptitle(titled(runs), parse_math=False)
    save(figure, path)


THREADS = ("host", "device")


def write_perfetto(path: Path, timeline: Timeline) -> None:
    """Write all records of all ranks: each rank is a process, its host and its device are threads."""
    trace = {"traceEvents": list(_events(timeline)), "displayTimeUnit": "ms"}
    write_whole(path, json.dumps(trace, allow_nan=False))


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    starts = [trace.records["start"] for trace in timeline.traces if len(trace.records)]
    start = min((float(times.min()) for times in starts), default=0.0)
    end = timeline.end()
    for trace in timeline.traces:
        rank = trace.facts["rank"]
        named = {"name": f"rank {rank} on {trace.facts['host']}"}
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": named}
        for thread, name in enumerate(THREADS):
            about = {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name"}
            yield {**about, "args": {"name": name}}
        for record in trace.records:
            kind, last = int(record["kind"]), float(record["end"] or end)
            name = f"step {record['step'] + 1}" if kind == STEP else described(trace, record)
            event = {
                "pid": rank,
                "tid": int(kind == DEVICE),
                "name": name,
                "cat": KINDS[kind],
                "ts": 1e6 * (float(record["start"]) - start),
                "args": {"step": int(record["step"]) + 1},
            }
            if kind in (SEND, RECEIVE, REDUCTION):  # Several of these can overlap.
                event |= {"id": f"{rank}.{record['number']}"}
                yield {**event, "ph": "b"}
                yield {**event, "ph": "e", "ts": 1e6 * (last - start)}
            else:
                yield {**event, "ph": "X", "dur": 1e6 * (last - float(record["start"]))}


STYLE = (
    "body { font: 15px sans-serif; max-width: 1300px; margin: 2em auto; padding: 0 1em } img { width: 100% } "
    "p { overflow-wrap: anywhere; margin: 0.4em 0 } pre { background: #f4f4f4; padding: 1em; overflow-x: auto }"
)


class PageSection(NamedTuple):
    """The part of the HTML page about one run.

    words     text of the report
    timeline  PNG file, or None
    perfetto  trace file for Perfetto, or None
    """

    words: str
    timeline: Path | None
    perfetto: Path | None = None


def write_page(path: Path, runs: Mapping[str, PageSection], metrics: Path) -> None:
    """Write the HTML page.

    runs     {name of a run: its section}
    metrics  PNG file with the metrics of all runs
    """
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>mpitrain runs report</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>mpitrain runs report</h1>"
    ]
    for name, section in runs.items():
        parts += [f"<h2>{html.escape(visible(name))}</h2>", *_paragraphs(section.words)]
        if section.timeline:
            parts.append(_image(section.timeline, f"timeline of {name}"))
        if section.perfetto:
            link = quote(os.path.relpath(section.perfetto, path.parent), errors="surrogateescape")
            parts.append(
                f'<p><a href="{link}">{section.perfetto.name}</a>: what the ranks have noted, for ui.perfetto.dev</p>'
            )
    parts += [
        f"<h2>Metrics</h2>\n{_image(metrics, 'loss, learning rate, throughput and memory')}",
        "</body></html>\n",
    ]
    write_whole(path, "\n".join(parts))


def _paragraphs(words: str) -> Iterator[str]:
    """Yield sentences as paragraphs, and indented lines (tables, lists) as preformatted text."""
    for is_table, lines in groupby(words.splitlines(), lambda line: line.startswith(" ")):
        if is_table:
            yield "<pre>" + html.escape("\n".join(lines)) + "</pre>"
        else:
            yield from (f"<p>{html.escape(line)}</p>" for line in lines)


def _image(path: Path, what: str) -> str:
    data = base64.b64encode(contents(path)).decode()
    return f'<img alt="{html.escape(what)}" src="data:image/png;base64,{data}">'
