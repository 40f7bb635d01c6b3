"""Pictures of benchmark rows. They need matplotlib (the `report` extra)."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from mpitrain.plots import painter, save
from mpitrain.tools.bench.collectives.row import CollectiveRow

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8c564b",
    "#7f7f7f",
    "#bcbd22",
    "#17becf",
)
"""Colours of curves, which colour-blind readers can distinguish as far as possible.

`auto` is a broad grey line behind the curve of the algorithm that it chooses.
"""
DASHES, MARKS = ("-", "--", "-."), "os^"
"""Dashes and marks of the first, second and third ten curves; predictions are dotted."""


ROOM = 1.2
"""Largest value of an axis, relative to the largest median."""


class Look(NamedTuple):
    """The style of a curve."""

    colour: str
    dash: str
    mark: str


def look(number: int) -> Look:
    """Return the style of a curve by its number; the first thirty styles all differ."""
    again = number // len(COLOURS) % len(DASHES)
    return Look(COLOURS[number % len(COLOURS)], DASHES[again], MARKS[again])


def plot(rows: Sequence[CollectiveRow], facts: dict[str, Any], path: Path) -> None:
    """Draw time and bus bandwidth over bytes.

    A curve is the median of the sweeps, with a band from the fastest run to p99; predictions are
    dotted. The axes follow the medians, so the frame cuts off a far prediction or p99. Labels over
    the curve of `auto` name its choice, where it changes. The machine is named below.

    facts  returned by header.header
    """
    pyplot = painter()
    curves: dict[tuple[str, str], dict[int, list[CollectiveRow]]] = {}
    for row in rows:
        curves.setdefault((row.algorithm, row.buffers), {}).setdefault(row.bytes, []).append(row)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 6), layout="constrained")
    looks = map(look, range(len(curves)))
    for (algorithm, buffers), by_bytes in curves.items():
        name = algorithm if len({where for _, where in curves}) == 1 else f"{algorithm}, {buffers}"
        if algorithm == "auto":
            _draw((left, right), name, by_bytes, color="#bbbbbb", linewidth=6, marker=".", zorder=1)
            _choices(right, by_bytes)
            if {row.chosen for rows in by_bytes.values() for row in rows} - {
                measured for measured, _ in curves
            }:
                # The algorithm that `auto` chose has no curve, so `auto` gets its band.
                _surround((left, right), by_bytes, "#777777")
            continue
        own = next(looks)
        _draw(
            (left, right),
            name,
            by_bytes,
            color=own.colour,
            linestyle=own.dash,
            linewidth=1.5,
            marker=".",
            zorder=3,
        )
        _surround((left, right), by_bytes, own.colour)
    sizes = sorted({row.bytes for row in rows})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            sizes[:: -(-len(sizes) // 9)],
            labels=[readable(size) for size in sizes[:: -(-len(sizes) // 9)]],
        )
        axes.minorticks_off()
        axes.set_xlabel("array")
        axes.grid(alpha=0.3)
    measured = [rows for by_bytes in curves.values() for rows in by_bytes.values()]
    fastest = [_time(rows, "min_us") for rows in measured]
    times = [_time(rows, "time_us") for rows in measured]
    left.set(
        yscale="log",
        ylim=(min(fastest) / ROOM, max(times) * ROOM),
        ylabel="microseconds",
        title="time",
    )
    right.set(
        ylim=(0, ROOM * max(_bandwidth(rows, "time_us") for rows in measured)),
        ylabel="GB/s",
        title="bus bandwidth",
    )
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.suptitle(
        f"{rows[0].op} of {rows[0].dtype}, {facts['ranks']} ranks on {facts['hosts']} host(s)",
        weight="bold",
    )
    figure.supxlabel(
        f"{facts['processor']}, {facts['cores']} cores a host; {facts['mpi']}; device {facts['device']}; mpitrain "
        f"{facts['mpitrain']}.  Line: median; band: fastest run to p99; dotted: predicted; "
        "values far from all medians are cut off",
        fontsize="small",
    )
    save(figure, path, 110)
    pyplot.close(figure)


def _draw(
    views: Sequence[Any], name: str, by_bytes: dict[int, list[CollectiveRow]], **style: Any
) -> None:
    """Draw an algorithm's curve of medians into both axes.

    views     axes of time and of bus bandwidth
    by_bytes  {array size in bytes: rows of this algorithm}
    """
    for axes, of in zip(views, (_time, _bandwidth), strict=True):
        axes.plot(
            list(by_bytes), [of(rows, "time_us") for rows in by_bytes.values()], label=name, **style
        )


def _surround(views: Sequence[Any], by_bytes: dict[int, list[CollectiveRow]], colour: str) -> None:
    """Draw the band from the fastest run to p99, and the predicted curve, into both axes."""
    for axes, of in zip(views, (_time, _bandwidth), strict=True):
        fastest, p99, predicted = (
            [of(rows, field) for rows in by_bytes.values()]
            for field in ("min_us", "p99_us", "predicted_us")
        )
        axes.fill_between(list(by_bytes), fastest, p99, color=colour, alpha=0.12, linewidth=0)
        axes.plot(list(by_bytes), predicted, ":", color=colour, zorder=2)


def _time(rows: Sequence[CollectiveRow], field: str) -> float:
    return median(getattr(row, field) for row in rows)


def _bandwidth(rows: Sequence[CollectiveRow], field: str) -> float:
    """Return the median bus bandwidth in GB/s that the times in column `field` give."""
    return median(row.busbw_GBs * row.time_us / getattr(row, field) for row in rows)


def _choices(axes: Any, by_bytes: dict[int, list[CollectiveRow]]) -> None:
    """Mark each size at which the choice of `auto` changes, with its name at the top."""
    before = ""
    for size in sorted(by_bytes):
        chosen = by_bytes[size][0].chosen
        if chosen != before:
            axes.axvline(size, color="black", alpha=0.3, linewidth=1, linestyle="--")
            axes.text(
                size,
                0.99,
                f" auto: {chosen}",
                rotation=90,
                transform=axes.get_xaxis_transform(),
                verticalalignment="top",
                fontsize="small",
            )
        before = chosen


def readable(nbytes: int) -> str:
    """Format a number of bytes as 64 B, 4 KiB or 1.5 MiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= 0.99 * size:  # arrays are rounded down to whole elements per rank
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"
