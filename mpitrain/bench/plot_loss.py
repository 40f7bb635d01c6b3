"""Pictures of runs: the loss of each, over steps, tokens, samples or time; needs matplotlib (the `report` extra)."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from mpitrain.bench.collectives.plot import look
from mpitrain.errors import ConfigError
from mpitrain.plots import painter, save

AXES = {
    "steps": "optimizer steps",
    "tokens": "tokens seen",
    "samples": "samples seen",
    "time": "seconds, evaluations included",
}
LONG = 180  # seconds from which time is drawn in minutes
LARGEST = 1e300  # a log may hold a whole number that no float can be
SMOOTHED = 60  # a curve of many points is drawn as a moving mean over this part of it, the points themselves pale behind


def draw(
    runs: Mapping[str, list[dict[str, Any]]], over: str, is_log: bool, path: Path, title: str = ""
) -> None:
    """Training losses as lines, validation losses as marked points, one colour per run.

    runs    records of metrics.jsonl by the name in the legend
    over    a key of AXES
    is_log  a logarithmic axis of losses
    title   empty: the names of the runs
    raises  ConfigError if a run has no losses, or nothing of what is asked for
    """
    pyplot = painter()
    from matplotlib.ticker import EngFormatter, MaxNLocator, ScalarFormatter

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    curves = {
        name: [points(records, field, over) for field in ("loss", "val_loss")]
        for name, records in runs.items()
    }
    xlabel, unit = AXES[over], 1
    if (
        over == "time"
        and max((x for both in curves.values() for curve in both for x, _ in curve), default=0)
        > LONG
    ):
        xlabel, unit = xlabel.replace("seconds", "minutes"), 60
    for number, (name, both) in enumerate(curves.items()):
        colour, dash, mark = look(number)
        trained, validated = ([(x / unit, y) for x, y in curve] for curve in both)
        if not trained:
            raise ConfigError(
                f"The metrics of {name} have no losses over {over}.",
                "Name a run that has trained, or another --over.",
            )
        line = smooth(trained)
        label = f"{legible(name)}: training {line[-1][1]:#.4g}" + (
            f", validation {validated[-1][1]:#.4g}" if validated else ""
        )
        axes.plot(
            *zip(*line, strict=True), color=colour, linestyle=dash, linewidth=1.8, label=label
        )
        if len(trained) >= 2 * SMOOTHED:
            axes.plot(*zip(*trained, strict=True), color=colour, linewidth=0.7, alpha=0.3, zorder=1)
        if validated:
            axes.plot(
                *zip(*validated, strict=True),
                mark,
                color=colour,
                markeredgecolor="black",
                markersize=6,
                zorder=4,
            )
    if any(validated for _, validated in curves.values()):
        axes.plot([], [], "o", color="white", markeredgecolor="black", label="validation")
    axes.set_title(title or titled(runs), fontsize="medium", parse_math=False)
    axes.set(xlabel=xlabel, ylabel="loss, nats per prediction", xlim=(0, None))
    if over == "steps":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if over in ("tokens", "samples"):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 500k, 1M
    if is_log:
        axes.set_yscale("log")
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks(ScalarFormatter())
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    for text in axes.legend(fontsize="small").get_texts():
        text.set_parse_math(False)  # a dollar sign is one
    save(figure, path, 120)
    pyplot.close(figure)


def titled(runs: Iterable[str]) -> str:
    """The names of some runs as a title: of many, the first ones and how many there are more."""
    names = [*map(legible, runs)]
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"and {len(names) - 3} more"])


def legible(name: str) -> str:
    """A path as matplotlib shows it: bytes that are not UTF-8 escaped, and not taken for a label to be hidden."""
    return ("./" if name.startswith("_") else "") + name.encode(
        "utf-8", "backslashreplace"
    ).decode()


def points(
    records: Iterable[Mapping[str, Any]], field: str, over: str
) -> list[tuple[float, float]]:
    """(place on the axis, loss) of every record with a finite loss; what has no place lies between its neighbours by step.

    A validation loss lies at the time when its step was done: that of the step's own line, or what the evaluation took, `eval_s`,
    before its end. An older version has not said what it took.
    """
    name = {"steps": "step", "time": "wall_s"}.get(over, f"{over}_seen")
    steps, places = [0.0], [0.0]
    for record in records:
        if all(is_number(record.get(key)) for key in ("step", name)):
            steps.append(float(record["step"]))
            places.append(float(record[name]))
    if len(places) == 1:
        return []
    drawn = [
        record
        for record in records
        if is_number(record.get(field)) and is_number(record.get("step"))
    ]
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


def _when_trained(record: Mapping[str, Any], trained: Mapping[Any, float]) -> Any:
    """The seconds after which the step of an evaluation was done. trained: those of lines on steps."""
    if record["step"] in trained or not all(
        is_number(record.get(key)) for key in ("wall_s", "eval_s")
    ):
        return trained.get(record["step"], record.get("wall_s"))
    return record["wall_s"] - record["eval_s"]


def is_number(value: Any) -> bool:
    """Whether it can be drawn."""
    return isinstance(value, int | float) and -LARGEST < value < LARGEST


def smooth(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The curve with every loss the mean of those around it, as far as it has more than 2 SMOOTHED points."""
    widest = len(curve) // (2 * SMOOTHED)
    reach = [
        min(widest, i) for i in range(len(curve))
    ]  # a steep start would be bent by a lopsided mean
    return [
        (x, fmean(y for _, y in curve[i - r : i + r + 1]))
        for i, ((x, _), r) in enumerate(zip(curve, reach, strict=True))
    ]
