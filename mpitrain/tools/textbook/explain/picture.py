"""Pictures of explanations: each frame is a table of coloured cells. `draw` needs matplotlib."""

import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.plots import painter, save
from mpitrain.tools.textbook.explain.explanation import Explanation, Frame
from mpitrain.tools.textbook.explain.terminal import formula_line, frame_title
from mpitrain.tools.words import text, width, wrapped

EMPTY, CHANGED, TEXT = "#f4f4f4", "#d55e00", "#1a1a1a"
"""Colours of a cell without contents, of the frame around a changed cell, and of text."""
INFINITE = "#f4b6b6"
"""Colour of a number that is too large."""
SHADES = ("#ffffff", "#d9f0d3", "#a6dba0", "#7fc97f", "#5aae61")
"""Colours from one summand to as many as any cell of the topic has."""
KINDS = {"F": "#9fd3f2", "BW": "#e3bcd2", "B": "#f5c26b", "W": "#7fcbb0"}
"""{instruction of a pipeline: colour}."""

CHARACTER, LINE = 0.082, 0.27
"""Inches of a character and of a row."""
TITLE_CHARACTER = 0.09
"""Inches of a character of a frame's title."""
HEAD, GAP, ARROWS = 1.6 * LINE, 0.15, 0.4
"""Inches of the head of a picture, between groups of columns, and of the arrows behind them."""
READABLE, MOST = 1.65, 240
"""How much larger the texts of a picture for a wall are, so that they have 14 points or more; the
largest scale of its frames, in %.
"""
WIDEST = 13.0
"""Largest width of a picture, in inches."""


def summands(cell: str) -> int:
    """Return the number of symbols that the text of a cell has."""
    return len(re.findall(r"\b\d*[a-z]\d*\b", cell))


def colour(cell: str, most: int) -> str:
    """Return the colour of a cell.

    most  the largest number of summands of any cell
    """
    if not cell or cell in ("-", "."):
        return EMPTY
    if cell == "inf":
        return INFINITE
    if kind := re.match(r"(BW|[FBW])\d", cell):
        return KINDS[kind[1]]
    share = (summands(cell) - 1) / max(1, most - 1)
    return SHADES[min(len(SHADES) - 1, max(0, round(share * (len(SHADES) - 1))))]


@cache
def hangul_font() -> str | None:
    from matplotlib import font_manager

    known = ("Nanum", "Noto Sans CJK", "Noto Sans KR", "Malgun", "Gulim", "UnDotum", "Baekmuk")
    names = sorted({font.name for font in font_manager.fontManager.ttflist})
    return next((name for name in names if name.startswith(known)), None)


class FrameLayout(NamedTuple):
    """Sizes of a picture, in inches.

    margin  of the labels of rows
    widths  of the columns
    bands   numbers of the groups of columns that stand beside each other; the bands stand below
            each other
    panel   (width, height) of a frame
    """

    margin: float
    widths: list[float]
    bands: list[list[int]]
    panel: tuple[float, float]

    @classmethod
    def of(cls, explanation: Explanation, language: str, room: float) -> "FrameLayout":
        """Return the layout of frames that are at most `room` wide, if a group of columns is."""
        widths = _widths(explanation, language)
        labels = (text(row, language) for row in explanation.rows)
        margin = CHARACTER * (2 + max(map(width, labels)))
        arrows = ARROWS if any(frame.messages for _, frame in explanation.drawn) else 0.0
        bands: list[list[int]] = []
        taken, first, wide = 0.0, 0, TITLE_CHARACTER * (2 + _longest_title(explanation, language))
        for number, group in enumerate(explanation.columns):
            last = first + len(group.names)
            needed = sum(widths[first:last]) + GAP
            if not bands or taken + needed > room:
                bands.append([])
                taken = margin + arrows + GAP
            bands[-1].append(number)
            taken, first = taken + needed, last
            wide = max(wide, taken)
        height = LINE * (1.2 + len(bands) * (len(explanation.rows) + 2.4))
        return cls(margin, widths, bands, (wide, height))


def draw(explanation: Explanation, path: Path, language: str, dpi: int = 100) -> str:
    """Draw all frames in one picture, and return the language of the texts.

    This is English if no font has the letters of the language.

    dpi     pixels of an inch
    raises  OSError if the file cannot be written
    """
    language = language if language != "ko" or hangul_font() else "en"
    layout = FrameLayout.of(explanation, language, math.inf)
    frames = explanation.drawn
    across = max(1, min(len(frames), int(WIDEST / layout.panel[0])))
    down = -(-len(frames) // across)
    wide = max(across * layout.panel[0], 7.5)
    notes = notes_of(explanation, language, int((wide - 0.3) / CHARACTER))
    high = HEAD + down * layout.panel[1] + LINE * (len(notes) + 0.8)
    _page(explanation, frames, notes, layout, (wide, high), path, language, dpi)
    return language


def draw_for_a_wall(explanation: Explanation, path: Path, language: str) -> tuple[str, list[Path]]:
    """Draw each frame as a picture of 1280 x 720, with text that is read from far away.

    Before the frames there are one or two pictures with the idea, the legend and the formulas.

    returns  the language of the texts, and the files: NAME-1.png and so on
    raises   OSError if a file cannot be written
    """
    language = language if language != "ko" or hangul_font() else "en"
    scale, layout = fitted(explanation, language)
    columns = int((12.8 / READABLE - 0.3) / CHARACTER)
    idea = [
        line for each in explanation.sentences for line in wrapped(text(each, language), columns)
    ]
    notes = [*idea, "", *notes_of(explanation, language, columns)]
    most = int((7.2 / READABLE - HEAD) / LINE - 0.8)
    files: list[Path] = []

    def add(frames: list[tuple[int, Frame]], notes: list[str], scale: float) -> None:
        files.append(path.with_name(f"{path.stem}-{len(files) + 1}{path.suffix}"))
        size = (12.8 / scale, 7.2 / scale)
        _page(explanation, frames, notes, layout, size, files[-1], language, round(100 * scale))

    for at in range(0, len(notes), most):
        add([], notes[at : at + most], READABLE)
    for each in explanation.drawn:
        add([each], [], scale)
    return language, files


def fitted(explanation: Explanation, language: str) -> tuple[float, FrameLayout]:
    """Return the largest scale at which a frame fits a picture of 12.8 x 7.2 inches, and its layout."""
    for percent in range(MOST, 20, -5):
        wide, high = 1280 / percent, 720 / percent
        layout = FrameLayout.of(explanation, language, wide)
        if layout.panel[0] <= wide and layout.panel[1] <= high - HEAD:
            break
    return percent / 100, layout


def _longest_title(explanation: Explanation, language: str) -> int:
    return max(width(frame_title(frame, language)) for _, frame in explanation.drawn)


def _page(
    explanation: Explanation,
    frames: Sequence[tuple[int, Frame]],
    notes: Sequence[str],
    layout: FrameLayout,
    size: tuple[float, float],
    path: Path,
    language: str,
    dpi: int,
) -> None:
    pyplot = painter()
    font = hangul_font() if language == "ko" else None
    with pyplot.rc_context({"font.family": [font or "DejaVu Sans"]}):
        figure = pyplot.figure(figsize=size)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, size[0]), ylim=(size[1], 0))
        axes.axis("off")
        axes.text(
            0.15,
            HEAD / 2,
            text(explanation.title, language),
            va="center",
            fontsize=13,
            weight="bold",
        )
        most = max(
            summands(cell) for frame in explanation.frames for row in frame.cells for cell in row
        )
        across = max(1, int((size[0] + 0.01) / layout.panel[0]))
        for index, (number, frame) in enumerate(frames):
            before = explanation.frames[number - 1] if number and not explanation.pictured else None
            corner = (index % across * layout.panel[0], HEAD + index // across * layout.panel[1])
            _panel(axes, explanation, frame, before, corner, layout, most, language)
        below = HEAD + -(-len(frames) // across) * layout.panel[1]
        for row, note in enumerate(notes):
            axes.text(0.15, below + LINE * (row + 0.4), note, va="center", fontsize=9, color=TEXT)
        save(figure, path, dpi)


def notes_of(explanation: Explanation, language: str, columns: int) -> list[str]:
    notes = [text(explanation.legend, language)]
    notes += [formula_line(formula, language) for formula in explanation.formulas]
    return [line for note in notes for line in wrapped(note, columns)]


def _widths(explanation: Explanation, language: str) -> list[float]:
    """Return the inches of each column: enough for its contents and for the heading of its group."""
    widths: list[float] = []
    for group in explanation.columns:
        first = len(widths)
        lengths = [
            max(
                width(name),
                *(len(cells[at]) for _, frame in explanation.drawn for cells in frame.cells),
            )
            for at, name in enumerate(group.named(language), first)
        ]
        inches = [CHARACTER * (1.4 + length) for length in lengths]
        short = CHARACTER * width(text(group.heading, language)) - sum(inches)
        widths += [column + max(0.0, short) / len(inches) for column in inches]
    return widths


def _panel(
    axes: Any,
    explanation: Explanation,
    frame: Frame,
    before: Frame | None,
    corner: tuple[float, float],
    layout: FrameLayout,
    most: int,
    language: str,
) -> None:
    """Draw one frame, with its top left corner at `corner` (inches)."""
    from matplotlib.patches import FancyArrowPatch, Rectangle

    left, top = corner
    changed = frame.changed(before)
    axes.text(left + 0.15, top + LINE * 0.7, frame_title(frame, language), va="center", fontsize=10)
    column = 0
    for band in layout.bands:
        x = left + layout.margin
        for group in (explanation.columns[number] for number in band):
            axes.text(
                x,
                top + LINE * 1.6,
                text(group.heading, language),
                va="center",
                fontsize=8,
                style="italic",
            )
            for name in group.named(language):
                wide = layout.widths[column]
                axes.text(
                    x + wide / 2, top + LINE * 2.4, name, va="center", ha="center", fontsize=8
                )
                for row, cells in enumerate(frame.cells):
                    y = top + LINE * (row + 2.9)
                    is_changed = (row, column) in changed
                    axes.add_patch(
                        Rectangle(
                            (x + 0.01, y + 0.01),
                            wide - 0.02,
                            LINE - 0.02,
                            facecolor=colour(cells[column], most),
                            edgecolor=CHANGED if is_changed else "#c8c8c8",
                            linewidth=1.8 if is_changed else 0.6,
                            zorder=3 if is_changed else 2,
                        )
                    )
                    axes.text(
                        x + wide / 2,
                        y + LINE / 2,
                        cells[column],
                        va="center",
                        ha="center",
                        fontsize=8.5,
                        family="DejaVu Sans Mono",
                        color=TEXT,
                        zorder=4,
                    )
                x, column = x + wide, column + 1
            x += GAP
        for row, label in enumerate(explanation.rows):
            axes.text(
                left + layout.margin - 0.08,
                top + LINE * (row + 3.4),
                text(label, language),
                va="center",
                ha="right",
                fontsize=9,
            )
        top += LINE * (len(explanation.rows) + 2.4)
    for source, target in frame.messages:
        start, end = (corner[1] + LINE * (row + 3.4) for row in (source, target))
        bend = min(0.6, 0.7 / abs(end - start))
        axes.add_patch(
            FancyArrowPatch(
                (x - 0.1, start),
                (x - 0.1, end),
                connectionstyle=f"arc3,rad={-bend if target > source else bend}",
                arrowstyle="-|>",
                mutation_scale=9,
                color=CHANGED,
            )
        )
