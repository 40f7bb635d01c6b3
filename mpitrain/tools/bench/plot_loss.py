"""Pictures of losses over steps, tokens, samples or time, by matplotlib (the extra `report`)."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.plots import add_legend, legible, look, save, subplots, titled, wrapped
from mpitrain.run.metrics import is_number

AXES = {
    "steps": "optimizer steps",
    "tokens": "tokens seen",
    "samples": "samples seen",
    "time": "seconds, evaluations included",
}
LONG = 180
"""Seconds above which the time axis is in minutes."""
SMOOTHED = 60
"""A curve of 2 SMOOTHED points or more is a moving mean over 1 / SMOOTHED of them.

The points themselves are drawn pale behind it.
"""


def draw(
    runs: Mapping[str, list[dict[str, Any]]], over: str, is_log: bool, path: Path, title: str = ""
) -> None:
    """Draw training losses as lines and validation losses as marked points, in one colour per run.

    runs    {name in the legend: records of its metrics.jsonl}
    over    the horizontal axis: a key of AXES
    is_log  whether the axis of losses is logarithmic
    title   default: the folder that has all runs, or their names
    raises  ConfigError if the records of a run do not have this axis
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator, ScalarFormatter

    figure, axes = subplots()
    curves = {
        name: (points(records, "loss", over), points(records, "val_loss", over))
        for name, records in runs.items()
    }
    last = max((x for both in curves.values() for curve in both for x, _ in curve), default=0)
    xlabel, unit = AXES[over], 1
    if over == "time" and last > LONG:
        xlabel, unit = xlabel.replace("seconds", "minutes"), 60
    folder = shared_folder([*runs])
    for number, (name, both) in enumerate(curves.items()):
        colour, dash, mark = look(number)
        trained, validated = ([(x / unit, y) for x, y in curve] for curve in both)
        if not trained:
            raise ConfigError(
                f"The metrics of {name} have no losses over {over}.",
                "Name a run that has trained, or another --over.",
            )
        line = smooth(trained)
        label = f"{legible(name[len(folder) :])}: training {line[-1][1]:#.4g}"
        label += f", validation {validated[-1][1]:#.4g}" if validated else ""
        axes.plot(*zip(*line, strict=True), color=colour, linestyle=dash, label=label)
        if len(trained) >= 2 * SMOOTHED:
            axes.plot(*zip(*trained, strict=True), color=colour, linewidth=0.7, alpha=0.3, zorder=1)
        if validated:
            style = {"markeredgecolor": "black", "markersize": 6, "zorder": 4}
            axes.plot(*zip(*validated, strict=True), mark, color=colour, **style)
    if any(validated for _, validated in curves.values()):
        axes.plot([], [], "o", color="white", markeredgecolor="black", label="validation")
    axes.set_title(wrapped(title or folder[:-1]) or titled(runs), parse_math=False)
    axes.set(xlabel=xlabel, ylabel="loss, nats per prediction", xlim=(0, None))
    if over == "steps":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if over in ("tokens", "samples"):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # it writes 500k or 1M
    if is_log:
        axes.set_yscale("log")
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks(ScalarFormatter())
    axes.grid(which="both")
    add_legend(figure, axes)
    save(figure, path)


def shared_folder(names: Sequence[str]) -> str:
    """Return the deepest folder in which all of these runs are, with its slash; empty: there is none, or one run."""
    folder = ""
    if len({*map(os.path.isabs, names)}) == 1 < len(names):
        folder = os.path.commonpath([os.path.dirname(name) for name in names])
    return f"{folder}/" if folder and all(name.startswith(f"{folder}/") for name in names) else ""


def points(
    records: Iterable[Mapping[str, Any]], field: str, over: str
) -> list[tuple[float, float]]:
    """Return (x, loss) of every record with a finite loss; a missing x is interpolated over steps.

    The last training loss of a leg is left out, unless it keeps the pace of the others.

    The time of a validation loss is the end of the training step before it, if a record has this
    step. Otherwise it is the end of the evaluation minus `eval_s`, which records of older versions
    lack.

    field  key of the loss in a record
    over   the horizontal axis: a key of AXES
    """
    name = {"steps": "step", "time": "wall_s"}.get(over, f"{over}_seen")
    steps, places = [0.0], [0.0]
    for record in records:
        if all(is_number(record.get(key)) for key in ("step", name)):
            steps.append(float(record["step"]))
            places.append(float(record[name]))
    if len(places) == 1:
        return []
    drawn = [record for record in records if _is_of(field, record)]
    ends = _ends_of_legs(records) if field == "loss" else set()
    drawn = [record for record in drawn if record["step"] not in ends]
    if field == "val_loss" and over == "time":
        trained = {
            record["step"]: record[name]
            for record in records
            if "loss" in record and is_number(record.get(name)) and is_number(record.get("step"))
        }
        drawn = [{**record, name: _when_trained(record, trained)} for record in drawn]
    at = [
        float(record[name])
        if is_number(record.get(name))
        else float(np.interp(record["step"], steps, places))
        for record in drawn
    ]
    return list(zip(at, (float(record[field]) for record in drawn), strict=True))


def _is_of(field: str, record: Mapping[str, Any]) -> bool:
    return is_number(record.get(field)) and is_number(record.get("step"))


def _ends_of_legs(records: Iterable[Mapping[str, Any]]) -> set[Any]:
    """Return the last step of each leg of a run, if its distances to the losses beside it differ.

    Such a loss would be a kink: the others are run.log_every steps apart, and this one is noise at
    another pace.
    """
    ends, steps, leg = set[Any](), list[Any](), -1
    for record in records:
        if record.get("event") == "resume":
            leg = len(steps) - 1
        elif _is_of("loss", record):
            steps.append(record["step"])
            if leg == len(steps) - 2 > 0 and steps[-1] - steps[-2] != steps[-2] - steps[-3]:
                ends.add(steps[-2])
    return ends


def _when_trained(record: Mapping[str, Any], trained: Mapping[Any, float]) -> Any:
    """Return the seconds at which the step before an evaluation ended.

    trained  {step: seconds at its end}
    """
    if record["step"] in trained or not all(
        is_number(record.get(key)) for key in ("wall_s", "eval_s")
    ):
        return trained.get(record["step"], record.get("wall_s"))
    return record["wall_s"] - record["eval_s"]


def smooth(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the curve as a moving mean of its losses; short curves are returned unchanged."""
    widest = len(curve) // (2 * SMOOTHED)
    # A one-sided mean would bend a steep start, so the reach grows from 0.
    reach = [min(widest, i) for i in range(len(curve))]
    return [
        (x, fmean(y for _, y in curve[i - r : i + r + 1]))
        for i, ((x, _), r) in enumerate(zip(curve, reach, strict=True))
    ]
