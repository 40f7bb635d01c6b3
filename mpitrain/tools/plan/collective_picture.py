"""Picture of a collective, by matplotlib (the extra `report`)."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.plots import COLOURS, WALL, numbered, save, subplots, wrapped
from mpitrain.tools.plan import several
from mpitrain.tools.plan.collective import Collective, Held, complete, contents, meeting

COPIED, ADDED = COLOURS[:2]
"""Colours of arrows, for messages that replace and for messages that are added."""

ARROW = {"arrowstyle": "-|>", "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}

MOST_ARROWS = 600
"""Largest number of messages drawn as arrows; more would hide each other."""

MOST_CELLS = 4000
"""Largest number of cells in a row; beyond it, a box shows the mean of its chunks."""

STRIP, WITHOUT_ARROWS = 0.62, 0.96
"""Fraction of a column that the chunks take, with arrows in the rest and without arrows."""

BORDER = 2.2
"""Inches of a picture beside, and above and below, its columns."""
NARROWEST, CHUNK = 1.1, 0.2
"""Smallest inches of a column with arrows, and of a chunk with a number in it."""

NUMBERED = 9
"""With at most this number of chunks per rank, each drawn chunk shows the ranks of its sum, or their number.
"""

NAMED = 4
"""With at most this number of ranks, a chunk shows the ranks of its sum."""


SUM = "\N{GREEK CAPITAL LETTER SIGMA}"
"""Stands for the sum over all ranks."""


def draw(collective: Collective, path: Path) -> list[Path]:
    """Draw ranks as rows and steps as columns, with arrows for messages, in pictures for a wall.

    The colour of a chunk shows how many of its contributions have arrived. If there is room, a
    chunk has the ranks of its sum: 0 +1 is the sum of what ranks 0 and 1 had. Steps for which one
    picture is too narrow are drawn in several; the first column of each is the last one before.

    returns  the files: the path itself, or NAME-1.png and so on
    """
    steps = len(collective.steps)
    has_arrows = 0 < sum(map(len, collective.steps)) <= MOST_ARROWS
    chunks = len(collective.bounds)
    column = max(NARROWEST, CHUNK * chunks if chunks <= NUMBERED else 0)
    most = max(1, int((WALL[0] - BORDER) / column) - 1) if has_arrows else max(1, steps)
    files = numbered(path, -(-max(1, steps) // most))
    each = -(-steps // len(files))
    for number, file in enumerate(files):
        last = min(steps, (number + 1) * each)
        _draw(collective, file, number * each, last, has_arrows)
    return files


def _draw(collective: Collective, path: Path, first: int, last: int, has_arrows: bool) -> None:
    """Draw the columns after the steps `first` to `last`, both included."""
    columns, chunks = last - first + 1, len(collective.bounds)
    is_mean = columns * chunks > MOST_CELLS
    filled = _filled(collective)[first : last + 1]  # (columns, ranks, chunks)
    if is_mean:
        filled = filled.mean(axis=2, keepdims=True)
    messages = [
        (step, message) for step in range(first, last) for message in collective.steps[step]
    ]
    strip = STRIP if has_arrows or not messages else WITHOUT_ARROWS
    figure, axes = subplots()
    has_numbers = (
        chunks <= NUMBERED
        and (WALL[0] - BORDER) * strip > 0.11 * columns * chunks
        and WALL[1] - BORDER > 0.15 * collective.ranks
    )
    held_by_column = islice(contents(collective), first, last + 1)
    for column, (held, chunks_of) in enumerate(zip(filled, held_by_column, strict=True), first):
        edges = np.linspace(column - strip / 2, column + strip / 2, held.shape[1] + 1)
        mesh = axes.pcolormesh(
            edges,
            np.arange(collective.ranks + 1) - 0.5,
            held,
            cmap="YlGn",
            vmin=0,
            vmax=1,
            edgecolors="white",
            linewidth=0.5 if has_numbers else 0,
        )
        if has_numbers:
            _sums(axes, edges, held, chunks_of)
    if has_arrows:
        for step, m in messages:
            axes.annotate(
                "",
                (step + 1 - strip / 2, m.target),
                (step + strip / 2, m.source),
                arrowprops=ARROW | {"color": ADDED if m.combine else COPIED},
            )
    met = meeting(collective)
    if met and first <= met.step < last:
        axes.axvline(met.step + strip / 2 + 0.02, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            f"{met.first}  |  {met.second}",
            (met.step + strip / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize="small",
        )
    ticks = range(first, last + 1, -(-columns // 24))
    axes.set_xticks(ticks, [f"{step}" if step else "start" for step in ticks])
    axes.set_yticks(range(0, collective.ranks, -(-collective.ranks // 20)))
    axes.set(
        xlabel="step: its messages travel together, then a rank holds what the box shows",
        ylabel="rank",
        ylim=(collective.ranks - 0.5, -0.5),
        xlim=(first - 0.5, last + 0.5),
    )
    cut = (
        f"each box is the mean of {several(chunks, 'chunk')}"
        if is_mean
        else f"each box is {several(chunks, 'chunk')}, {SUM} the sum over all ranks"
        if has_numbers and collective.ranks <= NAMED
        else f"each box is {several(chunks, 'chunk')}"
    )
    hidden = (
        "" if has_arrows or not messages else f"; {len(messages)} messages, too many for arrows"
    )
    axes.set_title(
        wrapped(f"{collective.title}, {several(len(collective.steps), 'step')}\n{cut}{hidden}\n")
    )
    n = collective.ranks
    label, shares = f"ranks whose data a chunk holds, of {n}", sorted({1, -(-n // 2), n})
    if collective.operation == "all-gather":
        label, shares = "chunk is there", [0, 1]
    bar = figure.colorbar(mesh, ax=axes, label=label, fraction=0.05, pad=0.02, aspect=12)
    bar.set_ticks([share / max(shares) for share in shares], labels=[*map(str, shares)])
    kinds = {m.combine for _, m in messages} if has_arrows else set()
    lines = [
        axes.plot([], [], color=colour, label=text, marker=">", markersize=5)[0]
        for is_added, colour, text in (
            (True, ADDED, "message that is added"),
            (False, COPIED, "message that replaces"),
        )
        if is_added in kinds
    ]
    if lines:
        figure.legend(handles=lines, loc="outside lower center", ncols=len(lines))
    save(figure, path)


def _filled(collective: Collective) -> np.ndarray:
    """Return the fraction of its contributions that each chunk has, (steps + 1, ranks, chunks)."""
    whole = [data.bit_count() for data in complete(collective)]
    return np.array(
        [
            [
                [data.bit_count() / most for data, most in zip(chunks, whole, strict=True)]
                for chunks in held
            ]
            for held in contents(collective)
        ]
    )


def _sums(axes: Any, edges: np.ndarray, shares: np.ndarray, held: Held) -> None:
    """Write into each chunk the ranks of its sum, below each other; among more ranks, their number."""
    for rank, chunks in enumerate(held):
        for chunk, data in enumerate(chunks):
            ranks = [f"{each}" for each in range(len(held)) if data >> each & 1]
            shown = "\n+".join(ranks) if len(ranks) < len(held) else SUM
            axes.text(
                (edges[chunk] + edges[chunk + 1]) / 2,
                rank,
                shown if len(held) <= NAMED else len(ranks),
                ha="center",
                va="center",
                fontsize="small",
                color="white" if shares[rank, chunk] > 0.7 else "black",
            )
