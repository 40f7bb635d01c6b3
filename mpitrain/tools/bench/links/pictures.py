"""Pictures of `bench pairs` and `bench bandwidth`. They need matplotlib (the `report` extra)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.plots import painter, save
from mpitrain.tools.bench.collectives.plot import look, readable
from mpitrain.tools.bench.links.bandwidth import BandwidthRow
from mpitrain.tools.bench.links.pairs import Pair, odd_pairs
from mpitrain.tools.bench.links.pairs_table import bandwidth, latency
from mpitrain.tools.text_table import figure as rounded

FEW = 12
"""Largest number of ranks for which the cells of a heat map show numbers."""


def plot_pairs(
    pairs: Sequence[Pair], places: Sequence[str], facts: dict[str, Any], path: Path
) -> None:
    """Draw latency and bandwidth of all pairs as heat maps.

    Dark cells are slow, odd links have a red frame, and lines separate hosts.

    places  classes of pairs in which links are judged
    """
    pyplot = painter()
    hosts = dict(
        host
        for pair in pairs
        for host in ((pair.first, pair.first_host), (pair.second, pair.second_host))
    )
    n = len(hosts)
    figure, views = pyplot.subplots(1, 2, figsize=(13, 6), layout="constrained")
    odd = odd_pairs(pairs, places)
    for axes, field, title, colours, what, text in (
        (views[0], "latency_us", "latency, microseconds one way", "viridis_r", "latency", latency),
        (views[1], "bandwidth_GBs", "bandwidth, GB/s one way", "viridis", "bandwidth", bandwidth),
    ):
        cells, marked = np.full((n, n), np.nan), np.zeros((n, n), bool)
        for pair in pairs:
            ends = [pair.first, pair.second], [pair.second, pair.first]
            cells[ends], marked[ends] = getattr(pair, field), "~" in text(pair)
        figure.colorbar(axes.imshow(cells, cmap=colours), ax=axes, shrink=0.8)
        for row, column in np.argwhere(np.isfinite(cells)) if n <= FEW else ():
            axes.text(
                column,
                row,
                rounded(float(cells[row, column])) + "~" * int(marked[row, column]),
                ha="center",
                va="center",
                fontsize="small",
                bbox={"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 1},
            )
        for each in odd:
            for x, y in (each.pair[:2], each.pair[1::-1]) if each.what == what else ():
                axes.add_patch(
                    pyplot.Rectangle(
                        (x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=3, zorder=3
                    )
                )
        for edge in (rank for rank in range(1, n) if hosts[rank] != hosts[rank - 1]):
            axes.axhline(edge - 0.5, color="black", linewidth=1)
            axes.axvline(edge - 0.5, color="black", linewidth=1)
        ticks = range(0, n, -(-n // 16))
        axes.set_xticks(ticks)
        axes.set_yticks(ticks, labels=[f"{rank} {hosts[rank]}" for rank in ticks])
        axes.set(title=title, xlabel="rank", ylabel="rank and host")
    title = f"all pairs of {n} ranks on {facts['hosts']} host(s)"
    has_marks = n <= FEW and any("~" in latency(pair) + bandwidth(pair) for pair in pairs)
    legend = ["Red frame: a link far from its class"] if odd else []
    legend += ["~: other work ran meanwhile"] if has_marks else []
    _finish(pyplot, figure, title, ".  ".join(legend), facts, path)


def plot_bandwidth(rows: Sequence[BandwidthRow], facts: dict[str, Any], path: Path) -> None:
    """Draw bandwidth and messages per second over message size, with a curve for each direction.

    Hollow marks are invalid rows: most of their windows took far longer than the fastest.
    """
    pyplot = painter()
    figure, views = pyplot.subplots(1, 2, figsize=(13, 6), layout="constrained")
    for axes, field, label in (
        (views[0], "GBs", "GB/s, all pairs and ways"),
        (views[1], "messages_s", "messages a second"),
    ):
        for number, ways in enumerate(dict.fromkeys(row.ways for row in rows)):
            curve, own = [row for row in rows if row.ways == ways], look(number)
            axes.plot(
                [row.bytes for row in curve],
                [getattr(row, field) for row in curve],
                color=own.colour,
                linestyle=own.dash,
                label=f"{ways} way" + "s" * (ways == "both"),
            )
            for row in curve:
                filled = "none" if row.is_spoilt else "full"
                axes.plot(
                    row.bytes, getattr(row, field), own.mark, color=own.colour, fillstyle=filled
                )
        lengths = sorted({row.bytes for row in rows})
        ticks = lengths[:: -(-len(lengths) // 9)]
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, labels=[readable(nbytes) for nbytes in ticks])
        axes.minorticks_off()
        axes.set(xlabel="bytes of a message", ylabel=label, title=label, yscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    title = f"{rows[0].window} messages in flight, {rows[0].pairs} pair(s) of {facts['ranks']} ranks on {facts['hosts']} host(s)"
    legend = "Hollow: other work ran meanwhile" if any(row.is_spoilt for row in rows) else ""
    _finish(pyplot, figure, title, legend, facts, path)


def _finish(
    pyplot: Any, figure: Any, title: str, legend: str, facts: dict[str, Any], path: Path
) -> None:
    figure.suptitle(title, weight="bold")
    machine = f"{facts['processor']}, {facts['cores']} cores a host; {facts['mpi']}; mpitrain {facts['mpitrain']}"
    figure.supxlabel(f"{machine}.  {legend}".rstrip(), fontsize="small")
    save(figure, path, 110)
    pyplot.close(figure)
