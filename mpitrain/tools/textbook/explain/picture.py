"""Pictures of explanations: each frame is a table of coloured cells. `draw` needs matplotlib."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from mpitrain.plots import painter, save
from mpitrain.tools.textbook.explain.explanation import Explanation, Frame
from mpitrain.tools.textbook.explain.terminal import formula_line, frame_title
from mpitrain.tools.textbook.words import text, width, wrapped

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


def draw(explanation: Explanation, path: Path, language: str, dpi: int = 100) -> str:
    """Draw the frames of an explanation, and return the language of the texts.

    This is English if no font has the letters of the language.

    dpi     pixels of an inch
    raises  OSError if the file cannot be written
    """
    pyplot = painter()
    font = hangul_font() if language == "ko" else None
    language = language if font else "en"
    frames = explanation.drawn
    widths = _widths(explanation, language)
    labels = [text(row, language) for row in explanation.rows]
    margin = CHARACTER * (2 + max(map(width, labels)))
    titles = [frame_title(frame, language) for _, frame in frames]
    panel = max(
        margin + sum(widths) + 0.15 * (len(explanation.columns) + 1),
        TITLE_CHARACTER * (2 + max(map(width, titles))),
    )
    across = max(1, min(len(frames), int(WIDEST / panel)))
    down = -(-len(frames) // across)
    height = LINE * (len(explanation.rows) + 3.6)
    head = LINE * 1.6
    wide = max(across * panel, 7.5)
    notes = notes_of(explanation, language, int((wide - 0.3) / CHARACTER))
    size = (wide, head + down * height + LINE * (len(notes) + 0.8))
    with pyplot.rc_context({"font.family": [font or "DejaVu Sans"]}):
        figure = pyplot.figure(figsize=size)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, size[0]), ylim=(size[1], 0))
        axes.axis("off")
        axes.text(
            0.15,
            head / 2,
            text(explanation.title, language),
            va="center",
            fontsize=13,
            weight="bold",
        )
        most = max(
            summands(cell) for frame in explanation.frames for row in frame.cells for cell in row
        )
        for index, (number, frame) in enumerate(frames):
            before = explanation.frames[number - 1] if number and not explanation.pictured else None
            corner = (index % across * panel, head + index // across * height)
            _panel(axes, explanation, frame, before, corner, widths, margin, most, language)
        for row, note in enumerate(notes):
            y = head + down * height + LINE * (row + 0.4)
            axes.text(0.15, y, note, va="center", fontsize=9, color=TEXT)
        save(figure, path, dpi)
    return language


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
    widths: list[float],
    margin: float,
    most: int,
    language: str,
) -> None:
    """Draw one frame, with its top left corner at `corner` (inches)."""
    from matplotlib.patches import Rectangle

    left, top = corner
    changed = frame.changed(before)
    axes.text(left + 0.15, top + LINE * 0.7, frame_title(frame, language), va="center", fontsize=10)
    x, column = left + margin, 0
    for group in explanation.columns:
        axes.text(
            x,
            top + LINE * 1.6,
            text(group.heading, language),
            va="center",
            fontsize=8,
            style="italic",
        )
        for name in group.named(language):
            wide = widths[column]
            axes.text(x + wide / 2, top + LINE * 2.4, name, va="center", ha="center", fontsize=8)
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
        x += 0.15
    for row, label in enumerate(explanation.rows):
        axes.text(
            left + margin - 0.08,
            top + LINE * (row + 3.4),
            text(label, language),
            va="center",
            ha="right",
            fontsize=9,
        )
