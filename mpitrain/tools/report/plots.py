"""Pictures of a run's timeline and metrics; needs matplotlib (the `report` extra)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.plots import add_legend, legible, look, save, subplots, titled
from mpitrain.run.metrics import is_number
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
from mpitrain.trace.timeline import Timeline, Trace, named_steps

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
    figure, axes = subplots(15, 1.6 + 0.55 * ranks)
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
        for record in spans[(spans["phase"] == FORWARD) & (spans["unit"] == 0)]:
            axes.text(
                1e3 * (record["start"] - zero),
                rank,
                f" {record['micro']}",
                fontsize="xx-small",
                va="center",
                zorder=3,
            )
    axes.set(
        xlabel="ms",
        yticks=range(ranks),
        yticklabels=[_row_name(trace) for trace in timeline.traces],
        xlim=(0, 1e3 * (last - zero)),
        ylim=(ranks - 0.45, -0.5),
    )
    axes.set_title(f"{legible(name)}, {named_steps(shown)}", fontsize="medium", parse_math=False)
    figure.legend(
        handles=[
            Patch(facecolor=fill, edgecolor="black", linewidth=0.4, label=what)
            for what, fill in (FILLS | BENEATH).items()
            if fill in drawn
        ],
        loc="outside lower center",
        ncols=9,
        fontsize="small",
    )
    save(figure, path, 120, inner=2)


def _look(record: Any, has_device: bool) -> tuple[str, float, float] | None:
    """Return the colour, vertical offset and height of a record, or None if it is not drawn.

    Host compute is not drawn on ranks with a device: it only launches work.
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
    axes = " ".join(f"{axis}{place[axis]}" for axis in ("dp", "pp", "tp")) if place else "server"
    return f"rank {trace.facts['rank']}: {axes}"


def draw_metrics(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw loss, learning rate, throughput and memory of runs over their steps.

    runs  records of metrics.jsonl, by the run's name in the legend
    """
    from matplotlib.ticker import MaxNLocator

    figure, views = subplots(13, 7, 2, 2)
    has_validation = False
    for axes, (title, fields) in zip(views.flat, CHARTS.items(), strict=True):
        for number, (name, records) in enumerate(runs.items()):
            colour, dash, mark = look(number)
            shown = [record for record in records if is_number(record.get("step"))]
            for field in (
                fields[:1]
                if any(is_number(record.get(fields[0])) for record in shown)
                else fields[1:]
            ):
                points = [
                    (float(record["step"]), float(record[field]) / (1e6 if "bytes" in field else 1))
                    for record in shown
                    if is_number(record.get(field)) and "event" not in record
                ]
                if points:
                    axes.plot(
                        *zip(*points, strict=True),
                        color=colour,
                        linestyle=dash,
                        label=legible(name),
                    )
            points = [
                (float(record["step"]), float(record[field]))
                for field in fields
                if field == "val_loss"
                for record in shown
                if is_number(record.get(field))
            ]
            if points:
                axes.plot(*zip(*points, strict=True), mark, color=colour, markeredgecolor="black")
                has_validation = True
        axes.set(title=title, xlabel="step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if title != "loss":
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
    if has_validation:
        views[0, 0].plot([], [], "o", color="white", markeredgecolor="black", label="validation")
    if views[0, 0].get_legend_handles_labels()[0]:
        add_legend(views[0, 0])
    figure.suptitle(titled(runs), parse_math=False)
    save(figure, path, 100, inner=2)
