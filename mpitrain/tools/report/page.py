"""The page of a report: one HTML file that opens offline. Timeline, curves and goodput are plots of Bokeh
(the extra `report`), which can be zoomed and pointed at; tables can be sorted.
"""

import html
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from mpitrain.errors import visible
from mpitrain.files import write_whole
from mpitrain.plots import COLOURS, PHASES
from mpitrain.tools.bench.plot_loss import points
from mpitrain.tools.report.text import spent, time_table
from mpitrain.tools.report.time_breakdown import Arrivals, TimeShares
from mpitrain.trace.recorder import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    DEVICE,
    FORWARD,
    PAUSE,
    RECEIVE,
    REDUCTION,
    SEND,
    WAIT,
)
from mpitrain.trace.timeline import Timeline, Trace, described

MOST_BARS = 100_000
"""Largest number of bars of a timeline: the newest records, which a browser still moves smoothly."""
AGAIN_S = 5
"""Seconds after which the page of a run in progress is written, and reads itself, again."""
CHARTS = {
    "loss": ("loss", "val_loss"),
    "learning rate": ("lr",),
    "tokens or samples per second": ("tokens_per_s", "samples_per_s"),
    "peak activations, MB": ("peak_activation_bytes",),
}
"""{title of a chart over steps: fields of a record, of which the first that a run has is drawn}."""
OF_PHASE = {
    FORWARD: ("forward", PHASES["F"]),
    BACKWARD: ("backward", PHASES["BW"]),
    BACKWARD_INPUT: ("input half of backward", PHASES["B"]),
    BACKWARD_WEIGHT: ("weight half of backward", PHASES["W"]),
}
OTHER = ("other computing", "#8c8c8c")
OF_KIND = {
    WAIT: ("waiting", "#dddddd"),
    PAUSE: ("evaluation, checkpoint", "#f0e442"),
    SEND: ("messages sent", "#000000"),
    RECEIVE: ("messages received", "#7f7f7f"),
    REDUCTION: ("reductions", COLOURS[1]),
}
PLACES = {SEND: (0.30, 0.06), RECEIVE: (0.36, 0.06), REDUCTION: (0.43, 0.08)}
"""{kind: (offset below the middle of a rank's row, height) of its bars}; those of others are BAR high."""
BAR = 0.5
PARTS = {
    "useful steps": COLOURS[2],
    "start-up": COLOURS[4],
    "checkpoints": COLOURS[0],
    "evaluation": COLOURS[5],
    "repeated or undone steps": COLOURS[1],
    "waiting between starts": "#dddddd",
    "other": COLOURS[7],
}


class RunReport(NamedTuple):
    """What a report says of one run.

    sentences  of its text: lines without the table of times; indented ones are items of lists
    records    of its metrics.jsonl
    timeline   of its ranks; None: it has no trace
    breakdown  of the time of its steps; None: there is none
    perfetto   trace file for Perfetto, or None
    """

    sentences: Sequence[str]
    records: Sequence[Mapping[str, Any]]
    timeline: Timeline | None = None
    breakdown: TimeShares | None = None
    perfetto: Path | None = None


def write_page(path: Path, runs: Mapping[str, RunReport], follows: bool = False) -> None:
    """Write the page of some runs.

    runs     {name of a run: its report}
    follows  whether the page reads itself again after AGAIN_S seconds
    """
    from bokeh.embed import components
    from bokeh.resources import Resources

    runs = {visible(name): report for name, report in runs.items()}
    plots = {"goodput": goodput_bar(runs), **curves(runs)}
    plots |= {
        f"timeline {name}": timeline_plot(report.timeline)
        for name, report in runs.items()
        if report.timeline
    }
    script, places = components({n: plot for n, plot in plots.items() if plot}, wrap_script=False)
    parts = list[str]()
    for name, report in runs.items():
        parts += [f"<h2>{html.escape(name)}</h2>", *_paragraphs(report.sentences)]
        if report.breakdown and report.timeline:
            parts.append(_table(report.breakdown, report.timeline))
        if report.timeline:
            shown = dict(timeline_bars(report.timeline)[0])
            parts += ["<h3>Timeline</h3>", _legend(shown), places[f"timeline {name}"]]
        if report.perfetto:
            link = quote(os.path.relpath(report.perfetto, path.parent), errors="surrogateescape")
            parts.append(
                f'<p><a href="{link}">{report.perfetto.name}</a> is for ui.perfetto.dev.</p>'
            )
    charts = [places[title] for title in CHARTS if title in places]
    looks = [(name, _colour(number)) for number, name in enumerate(runs)]
    parts += ["<h2>Metrics</h2>", _legend(looks), '<div class="charts">', *charts, "</div>"]
    if "goodput" in places:
        parts += ["<h2>Goodput</h2>", _legend(PARTS.items()), places["goodput"]]
    page = resources.files("mpitrain.tools.report").joinpath("page.html").read_text("utf-8")
    library = Resources("inline", components=["bokeh"]).render_js()
    texts = {
        "title": html.escape(", ".join(runs)),
        "library": library,
        "script": script.replace("</", "<\\/"),
        "again": str(AGAIN_S if follows else 0),
        "body": "\n".join(parts),
    }
    write_whole(path, re.sub(r"{{(\w+)}}", lambda match: texts[match[1]], page))


def _paragraphs(sentences: Sequence[str]) -> Iterator[str]:
    """Yield sentences as paragraphs, and indented lines as items of lists."""
    for is_list, lines in groupby(sentences, lambda line: line.startswith(" ")):
        texts = [html.escape(line.strip()) for line in lines]
        if is_list:
            yield "<ul>" + "".join(f"<li>{text}</li>" for text in texts) + "</ul>"
        else:
            yield from (f"<p>{text}</p>" for text in texts)


def _table(breakdown: TimeShares, timeline: Timeline) -> str:
    """Return a table with a row for each rank, which a click on a heading sorts."""
    heading, rows = time_table(breakdown, timeline)
    lines = [("", [name for name, _ in rows])]
    lines += [(who, [f"{values[at]:.1f}" for _, values in rows]) for at, who in enumerate(heading)]
    cells = [
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in (who, *texts)) + "</tr>"
        for tag, (who, texts) in zip(["th", *["td"] * len(heading)], lines, strict=True)
    ]
    return f'<div class="wide"><table><thead>{cells[0]}</thead><tbody>{"".join(cells[1:])}</tbody></table></div>'


def _legend(looks: Iterable[tuple[str, str]]) -> str:
    """Return a line of names with their colours, which wraps on a small screen."""
    return "".join(
        ['<p class="legend">']
        + [f'<span><i style="background: {c}"></i>{html.escape(n)}</span> ' for n, c in looks]
        + ["</p>"]
    )


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def figure_of(title: str, height: int, **options: Any) -> Any:
    """Return an empty figure as wide as the page, which the wheel zooms and dragging moves along x."""
    from bokeh.plotting import figure

    plot = figure(
        title=title,
        height=height,
        sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,box_zoom,reset,save",
        active_scroll="xwheel_zoom",
        toolbar_location="above",
        **options,
    )
    plot.toolbar.logo = None
    return plot


def curves(runs: Mapping[str, RunReport]) -> dict[str, Any]:
    """Return {title: figure} of CHARTS over steps, with a curve for each run."""
    from bokeh.models import HoverTool

    plots = {}
    for title, fields in CHARTS.items():
        plot = figure_of(title, 300, x_axis_label="step")
        unit = 1e6 if "bytes" in fields[0] else 1
        for number, (name, report) in enumerate(runs.items()):
            logged = [record for record in report.records if "event" not in record]
            drawn = next(filter(None, (points(logged, field, "steps") for field in fields)), [])
            look = {"color": _colour(number), "name": name}
            steps, values = [step for step, _ in drawn], [value / unit for _, value in drawn]
            if drawn:
                plot.line(steps, values, line_width=2, **look)
            validated = points(report.records, "val_loss", "steps") if title == "loss" else []
            if validated:
                plot.scatter(
                    *map(list, zip(*validated, strict=True)), size=8, line_color="black", **look
                )
        if plot.renderers:
            plot.add_tools(
                HoverTool(tooltips=[("", "$name"), ("step", "$x{0}"), (title, "$y{0.0000a}")])
            )
            if title != "loss":
                plot.y_range.start = 0
        plots[title] = plot if plot.renderers else None
    return plots


def goodput_bar(runs: Mapping[str, RunReport]) -> Any:
    """Return a figure with a bar for each run, divided into what its time was spent on; None: no run has noted it."""
    from bokeh.models import HoverTool

    parts_of = {name: spent(report.records) for name, report in runs.items()}
    parts_of = {name: parts for name, parts in parts_of.items() if parts}
    if not parts_of:
        return None
    plot = figure_of(
        "",
        110 + 40 * len(parts_of),
        y_range=[*reversed(parts_of)],
        x_axis_label="% of the time since the first start",
    )
    left = [0.0] * len(parts_of)
    for part, colour in PARTS.items():
        seconds = [max(0.0, parts.get(part, 0.0)) for parts in parts_of.values()]
        shares = [
            100 * each / sum(max(0.0, other) for other in parts.values())
            for each, parts in zip(seconds, parts_of.values(), strict=True)
        ]
        right = [start + share for start, share in zip(left, shares, strict=True)]
        source = {
            "run": [*parts_of],
            "left": left,
            "right": right,
            "share": shares,
            "seconds": seconds,
            "part": [part] * len(right),
        }
        plot.hbar(y="run", left="left", right="right", height=0.7, color=colour, source=source)
        left = right
    plot.add_tools(
        HoverTool(
            tooltips=[("", "@part"), ("share", "@share{0.0}%"), ("seconds", "@seconds{0,0.0}")]
        )
    )
    return plot


WINDOW = """
// Draw what the window shows; of bars that are narrower than a pixel, one for each pixel of a row.
const first = (values, limit) => {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < limit) low = middle + 1; else high = middle;
  }
  return low;
};
const pixel = (range.end - range.start) / 1500;
wholes.forEach((whole, number) => {
  const {left, right, until, y} = whole.data, picks = [], reached = new Map();
  for (let i = first(until, range.start), stop = first(left, range.end); i < stop; i++) {
    if (right[i] < range.start || (right[i] - left[i] < pixel && left[i] < (reached.get(y[i]) ?? -Infinity))) continue;
    reached.set(y[i], left[i] + pixel);
    picks.push(i);
  }
  drawn[number].data = Object.fromEntries(Object.entries(whole.data).map(([name, values]) => [name, picks.map(i => values[i])]));
});
"""


def timeline_plot(timeline: Timeline) -> Any:
    """Return a figure with a row for each rank: computing and waiting, below it messages and reductions."""
    from bokeh.models import (
        ColumnDataSource,
        CustomJS,
        CustomJSHover,
        HoverTool,
        NumeralTickFormatter,
        Range1d,
    )

    bars, texts, zero = timeline_bars(timeline)
    names = [_row_name(trace) for trace in timeline.traces]
    end = max((float(columns["right"].max()) for columns in bars.values()), default=1.0)
    window, steps = Range1d(0.0, end), timeline.steps()
    if steps:  # The newest two steps first.
        shown = range(max(steps.start, steps.stop - 2), steps.stop)
        windows = [timeline.window(rank, shown) for rank in range(len(names))]
        window.start = min(start for start, _ in windows) - zero
        window.end = max(stop for _, stop in windows) - zero
    plot = figure_of(
        "",
        90 + 44 * len(names),
        y_range=(len(names) - 0.4, -0.6),
        x_range=window,
        x_axis_label="seconds",
    )
    wholes, drawn = [], []
    for (_, colour), columns in bars.items():
        height = columns.pop("height")[0]
        inside = (columns["right"] >= window.start) & (columns["left"] <= window.end)
        wholes.append(ColumnDataSource(columns))
        drawn.append(ColumnDataSource({name: values[inside] for name, values in columns.items()}))
        place = {"y": "y", "left": "left", "right": "right", "height": height}
        plot.hbar(**place, fill_color=colour, line_color=None, source=drawn[-1])
    draws = CustomJS(args={"range": window, "wholes": wholes, "drawn": drawn}, code=WINDOW)
    window.js_on_change("start", draws)
    window.js_on_change("end", draws)
    text = CustomJSHover(args={"texts": texts}, code="return texts[value]")
    who = CustomJSHover(code="return value < 0 ? '-' : `rank ${value}`")
    plot.add_tools(
        HoverTool(
            tooltips=[
                ("rank", "@rank"),
                ("step", "@step"),
                ("", "@text{custom}"),
                ("bytes", "@nbytes{0,0}"),
                ("waits for", "@awaited{custom}"),
                ("begins", "@left{0.000000} s"),
                ("takes", "@ms{0,0.000} ms"),
            ],
            formatters={"@text": text, "@awaited": who},
            point_policy="follow_mouse",
        )
    )
    plot.yaxis.ticker = [*range(len(names))]
    plot.yaxis.major_label_overrides = dict(enumerate(names))
    plot.xaxis.ticker.desired_num_ticks = 4  # which do not touch on a phone
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0.[000000]")
    plot.grid.grid_line_alpha = 0.3
    return plot


def timeline_bars(
    timeline: Timeline,
) -> tuple[dict[tuple[str, str], dict[str, np.ndarray]], list[str], float]:
    """Return the newest records as bars, at most MOST_BARS.

    returns  {(name, colour): columns of its bars, by their start; `until` is the end of all up to
             each}, the texts that column `text` numbers, and the time
             that is 0 on the axis
    """
    wanted = (COMPUTE, DEVICE, *OF_KIND)
    of_ranks = []
    for trace in timeline.traces:
        records = trace.records[np.isin(trace.records["kind"], wanted)]
        if (records["kind"] == DEVICE).any():  # The host only launches work.
            records = records[records["kind"] != COMPUTE]
        of_ranks.append(records[-(MOST_BARS // len(timeline.traces)) :])
    zero = min((float(records["start"].min()) for records in of_ranks if len(records)), default=0.0)
    end, arrivals = timeline.end(), Arrivals(timeline, range(1 << 31))
    numbers: dict[str, int] = {}
    rows: dict[tuple[str, str], list[tuple[Any, ...]]] = {}
    for rank, (trace, records) in enumerate(zip(timeline.traces, of_ranks, strict=True)):
        for record in records:
            kind = int(record["kind"])
            look = OF_KIND.get(kind) or OF_PHASE.get(int(record["phase"]), OTHER)
            awaited = arrivals.of(rank, record)[0] if kind == WAIT else rank
            text = numbers.setdefault(visible(described(trace, record)), len(numbers))
            begin, last = float(record["start"]), float(record["end"] or end)
            offset, height = PLACES.get(kind, (0.0, BAR))
            nbytes = int(record["nbytes"]) if kind in (SEND, RECEIVE, REDUCTION) else 0
            rows.setdefault(look, []).append(
                (
                    begin - zero,
                    last - zero,
                    1e3 * (last - begin),
                    rank + offset,
                    rank,
                    int(record["step"]) + 1,
                    text,
                    nbytes,
                    awaited if awaited != rank else -1,
                    height,
                )
            )
    fields = ("left", "right", "ms", "y", "rank", "step", "text", "nbytes", "awaited", "height")
    types = ("f8", "f8", "f4", "f4", "i4", "i4", "i4", "f4", "i4", "f4")
    bars = {}
    for look in (*OF_PHASE.values(), OTHER, *OF_KIND.values()):  # a wait lies on what it is in
        if look in rows:
            columns = zip(fields, types, zip(*sorted(rows[look]), strict=True), strict=True)
            bars[look] = {field: np.array(values, type_) for field, type_, values in columns}
            bars[look]["until"] = np.maximum.accumulate(bars[look]["right"])
    return bars, [*numbers], zero


def _row_name(trace: Trace) -> str:
    place = trace.facts["place"]
    axes = " ".join(f"{axis}{place[axis]}" for axis in sorted(place)) if place else "server"
    return f"{trace.rank_name}: {axes}"
