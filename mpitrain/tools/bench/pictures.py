"""Pictures of collectives and of pairs, by matplotlib (the extra `report`)."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mpitrain.plots import COLOURS, add_legend, look, save, set_byte_ticks, subplots, wrapped
from mpitrain.tools.bench.collectives.sweep import CollectiveRow
from mpitrain.tools.bench.pairs import Pair, bandwidth, hosts_of, latency, odd_pairs
from mpitrain.tools.text_table import figure as rounded

ROOM = 1.2
"""Largest value of an axis, relative to the largest median."""
FEW = 12
"""Largest number of ranks for which the cells of a heat map show numbers."""
BOX = {"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 1}
"""The look of the box behind such a number."""


def plot(rows: Sequence[CollectiveRow], facts: dict[str, Any], path: Path) -> None:
    """Draw time and bus bandwidth of collectives over the bytes of the array.

    A curve is the median of the sweeps, in a band from the fastest run to p99. Predictions of the
    cost model are dotted. `auto` is a broad grey line behind the curve of the algorithm that it
    chooses; a label above it names this algorithm wherever it changes. The axes are as long as the
    medians need: the frame may cut off a prediction or p99 far from them.

    facts  returned by results.header
    """
    curves: dict[tuple[str, str], dict[int, list[CollectiveRow]]] = {}
    for row in rows:
        curves.setdefault((row.algorithm, row.buffers), {}).setdefault(row.bytes, []).append(row)
    figure, (left, right) = subplots(1, 2)
    looks = map(look, range(len(curves)))
    for (algorithm, buffers), by_bytes in curves.items():
        name = algorithm if len({where for _, where in curves}) == 1 else f"{algorithm}, {buffers}"
        if algorithm == "auto":
            style = {"color": "#bbbbbb", "linewidth": 6, "zorder": 1}
            _choices(right, by_bytes)
            chosen = {row.chosen for rows in by_bytes.values() for row in rows}
            # If an algorithm that `auto` chose has no curve, `auto` gets its band.
            surround = "#777777" if chosen - {measured for measured, _ in curves} else ""
        else:
            surround, dash, _ = next(looks)
            style = {"color": surround, "linestyle": dash, "zorder": 3}
        for axes, of in ((left, _time), (right, _bandwidth)):
            sizes, medians = [*by_bytes], [of(rows, "time_us") for rows in by_bytes.values()]
            axes.plot(sizes, medians, label=name, marker=".", **style)
            if surround:
                fastest, p99, predicted = (
                    [of(rows, field) for rows in by_bytes.values()]
                    for field in ("min_us", "p99_us", "predicted_us")
                )
                axes.fill_between(sizes, fastest, p99, color=surround, alpha=0.12, linewidth=0)
                axes.plot(sizes, predicted, ":", color=surround, zorder=2)
    for axes in (left, right):
        set_byte_ticks(axes, sorted({row.bytes for row in rows}), "array")
    measured = [rows for by_bytes in curves.values() for rows in by_bytes.values()]
    least = min(_time(rows, "min_us") for rows in measured)
    most = max(_time(rows, "time_us") for rows in measured)
    highest = max(_bandwidth(rows, "time_us") for rows in measured)
    left.set(yscale="log", ylim=(least / ROOM, most * ROOM), ylabel="microseconds", title="time")
    right.set(ylim=(0, ROOM * highest), ylabel="GB/s")
    right.set_title("bus bandwidth", pad=50 if "auto" in {name for name, _ in curves} else None)
    title = f"{rows[0].op} of {rows[0].dtype}, {facts['ranks']} ranks on {facts['hosts']} host(s)"
    add_legend(
        figure,
        left,
        "Line: median; band: fastest run to p99; dotted: predicted; values far from all medians are cut off",
    )
    _finish(figure, title, facts, path, f"; device {facts['device']}")


def _time(rows: Sequence[CollectiveRow], field: str) -> float:
    return median(getattr(row, field) for row in rows)


def _bandwidth(rows: Sequence[CollectiveRow], field: str) -> float:
    """Return the median bus bandwidth, in GB/s, computed from the times in column `field`."""
    return median(row.busbw_GBs * row.time_us / getattr(row, field) for row in rows)


def _choices(axes: Any, by_bytes: dict[int, list[CollectiveRow]]) -> None:
    """Write above each size at which the choice of `auto` changes the algorithm that it chooses."""
    before = ""
    for size in sorted(by_bytes):
        chosen = by_bytes[size][0].chosen
        if chosen != before:
            axes.axvline(size, color="black", alpha=0.3, linewidth=1, linestyle="--")
            style = {"rotation": 30, "va": "bottom", "fontsize": "x-small"}
            axes.text(size, 1.01, f"auto: {chosen}", transform=axes.get_xaxis_transform(), **style)
        before = chosen


def plot_pairs(
    pairs: Sequence[Pair], places: Sequence[str], facts: dict[str, Any], path: Path
) -> None:
    """Draw latency and bandwidth of all pairs as heat maps.

    Dark cells are slow, odd pairs have a frame, and lines separate hosts. Colours begin at 0, so pairs
    that differ little look alike; those of latencies reach to twice the usual one at least.

    places  classes of pairs in which odd ones are framed
    """
    from matplotlib.patches import Rectangle

    hosts, odd = hosts_of(pairs), odd_pairs(pairs, places)
    n = len(hosts)
    figure, views = subplots(1, 2)
    for axes, field, title, colours, what, text in (
        (views[0], "latency_us", "latency, microseconds one way", "viridis_r", "latency", latency),
        (views[1], "bandwidth_GBs", "bandwidth, GB/s one way", "viridis", "bandwidth", bandwidth),
    ):
        cells, marked = np.full((n, n), np.nan), np.zeros((n, n), bool)
        for pair in pairs:
            ends = [pair.first, pair.second], [pair.second, pair.first]
            cells[ends], marked[ends] = getattr(pair, field), "~" in text(pair)
        most = 1.05 * np.nanmax(cells)
        if what == "latency":
            most = max(most, 2 * np.nanmedian(cells))
        figure.colorbar(
            axes.imshow(cells, cmap=colours, vmin=0, vmax=most), ax=axes, orientation="horizontal"
        )
        for row, column in np.argwhere(np.isfinite(cells)) if n <= FEW else ():
            shown = rounded(float(cells[row, column])) + "~" * int(marked[row, column])
            axes.text(column, row, shown, ha="center", va="center", fontsize="small", bbox=BOX)
        for each in odd:
            for x, y in (each.pair[:2], each.pair[1::-1]) if each.what == what else ():
                corner = x - 0.5, y - 0.5
                frame = Rectangle(
                    corner, 1, 1, fill=False, edgecolor=COLOURS[1], linewidth=4, zorder=3
                )
                axes.add_patch(frame)
        for edge in (rank for rank in range(1, n) if hosts[rank] != hosts[rank - 1]):
            axes.axhline(edge - 0.5, color="black", linewidth=1)
            axes.axvline(edge - 0.5, color="black", linewidth=1)
        ticks = range(0, n, -(-n // 16))
        axes.set_xticks(ticks)
        axes.set_yticks(ticks, labels=[f"{rank} {hosts[rank]}" for rank in ticks])
        axes.set(title=title, xlabel="rank", ylabel="rank and host")
    has_marks = n <= FEW and any("~" in latency(pair) + bandwidth(pair) for pair in pairs)
    legend = ["Framed: a link far from its class"] * bool(odd)
    legend += ["~: other work ran meanwhile"] * has_marks
    figure.supxlabel(".  ".join(legend), fontsize="x-small")
    _finish(figure, f"all pairs of {n} ranks on {facts['hosts']} host(s)", facts, path)


def _finish(figure: Any, title: str, facts: dict[str, Any], path: Path, device: str = "") -> None:
    """Give the figure its title, with the machine below it, and save it."""
    machine = f"{facts['processor']}, {facts['cores']} cores a host; {facts['mpi']}{device}; mpitrain {facts['mpitrain']}"
    figure.suptitle(f"{title}\n{wrapped(machine)}")
    save(figure, path)
