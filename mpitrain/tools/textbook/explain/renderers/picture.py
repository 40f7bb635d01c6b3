"""Pictures of explanations: a table of coloured cells for each frame; needs matplotlib."""

from functools import cache
from pathlib import Path
from typing import Any

from mpitrain.plots import painter, save
from mpitrain.tools.textbook.explain.explanation import Explanation, Frame
from mpitrain.tools.textbook.explain.renderers.colours import CHANGED, TEXT, colour, summands
from mpitrain.tools.textbook.explain.renderers.terminal import formula_line, frame_title
from mpitrain.tools.textbook.words import width, wrapped

CHARACTER, LINE = 0.082, 0.27
"""Inches of a character and of a row."""
TITLE_CHARACTER = 0.09
"""Inches of a character of a frame's title."""
WIDEST = 13.0
"""Inches of a picture."""


@cache
def hangul_font() -> str | None:
    """Return the name of an installed font with Hangul, or None."""
    from matplotlib import font_manager

    known = ("Nanum", "Noto Sans CJK", "Noto Sans KR", "Malgun", "Gulim", "UnDotum", "Baekmuk")
    names = sorted({font.name for font in font_manager.fontManager.ttflist})
    return next((name for name in names if name.startswith(known)), None)


def draw(explanation: Explanation, path: Path, language: str, dpi: int = 100) -> None:
    """Draw the frames of an explanation, in English unless a font has Hangul.

    dpi     pixels of an inch
    raises  OSError if the file cannot be written
    """
    pyplot = painter()
    font = hangul_font() if language == "ko" else None
    language = language if font else "en"
    frames = explanation.drawn
    widths = _widths(explanation, language)
    labels = [row.into(language) for row in explanation.rows]
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
            explanation.title.into(language),
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


def notes_of(explanation: Explanation, language: str, columns: int) -> list[str]:
    """Return the legend and the formulas in lines of at most `columns`."""
    notes = [explanation.legend.into(language)]
    notes += [formula_line(formula, language) for formula in explanation.formulas]
    return [line for note in notes for line in wrapped(note, columns)]


def _widths(explanation: Explanation, language: str) -> list[float]:
    """Return the inches of each column, enough for its contents and for the heading of its group."""
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
        short = CHARACTER * width(group.heading.into(language)) - sum(inches)
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
    """Draw one frame with its top left corner at `corner`, in inches."""
    from matplotlib.patches import Rectangle

    left, top = corner
    changed = frame.changed(before)
    axes.text(left + 0.15, top + LINE * 0.7, frame_title(frame, language), va="center", fontsize=10)
    x, column = left + margin, 0
    for group in explanation.columns:
        axes.text(
            x,
            top + LINE * 1.6,
            group.heading.into(language),
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
            label.into(language),
            va="center",
            ha="right",
            fontsize=9,
        )
