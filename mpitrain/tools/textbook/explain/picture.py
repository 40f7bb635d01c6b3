"""Pictures of explanations, by matplotlib: each frame is a table of coloured cells."""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.plots import COLOURS, PHASES, WALL, painter, save
from mpitrain.tools.textbook.explain.explanation import CutMatrix, Explanation, Frame
from mpitrain.tools.textbook.explain.terminal import formula_line, frame_title
from mpitrain.tools.words import text, width, wrapped

EMPTY, CHANGED, TEXT = "#f4f4f4", COLOURS[1], "#1a1a1a"
"""Colours of a cell without contents, of the frame around a changed cell, and of text."""
INFINITE = "#f4b6b6"
"""Colour of a number that is too large."""
SHADES = ("#ffffff", "#d9f0d3", "#a6dba0", "#7fc97f", "#5aae61")
"""Colours from one summand to as many as any cell of the topic has."""

CHARACTER, LINE = 0.082, 0.27
"""Inches of a character and of a row."""
HEAD, GAP, ARROWS = 1.6 * LINE, 0.15, 0.4
"""Inches of the head of a picture, between groups of columns, and of the arrows behind them."""
TALLEST = 1.9
"""Largest height of a row, in LINEs: rows of a small table are as high as the picture has room for."""
READABLE, MOST = 165, 240
"""Scales in %: from the first on, all texts of a picture for a wall have 13 points or more; the
second is the largest.
"""
LABEL = 12
"""Points of the labels of a matrix."""
PARTS = (*PHASES.values(), SHADES[1], "#eeeeee")
"""Colours of the parts of a matrix; the last is that of a part without a number."""
TOGETHER = 3
"""Groups of columns that a picture shows whole; of more, only what the step has changed is drawn."""


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
        return PHASES[kind[1]]
    share = (summands(cell) - 1) / max(1, most - 1)
    return SHADES[min(len(SHADES) - 1, max(0, round(share * (len(SHADES) - 1))))]


@cache
def hangul_font() -> str | None:
    from matplotlib import font_manager

    known = ("Nanum", "Noto Sans CJK", "Noto Sans KR", "Malgun", "Gulim", "UnDotum", "Baekmuk")
    names = sorted({font.name for font in font_manager.fontManager.ttflist})
    return next((name for name in names if name.startswith(known)), None)


NO_HANGUL = (
    "the texts of the picture are English: no font has Hangul; install one such as fonts-nanum"
)


class ColumnRun(NamedTuple):
    """Consecutive columns of a group that are drawn beside each other: their heading, first and last."""

    heading: str
    first: int
    stop: int


class FrameLayout(NamedTuple):
    """Sizes of a picture, in inches.

    margin  of the labels of rows
    widths  of all columns
    bands   runs of columns that stand beside each other; the bands stand below each other
    panel   (width, height) of a frame
    row     height of a row
    """

    margin: float
    widths: list[float]
    bands: list[list[ColumnRun]]
    panel: tuple[float, float]
    row: float = LINE

    @classmethod
    def of(
        cls, explanation: Explanation, language: str, room: float, groups: Collection[int] = ()
    ) -> "FrameLayout":
        """Return the layout of frames that are at most `room` wide, if a column is.

        groups  numbers of the groups of columns to draw; empty: all
        """
        widths = _widths(explanation, language)
        labels = (text(row, language) for row in explanation.rows)
        margin = CHARACTER * (2 + max(map(width, labels)))
        messages = [message for frame in explanation.frames for message in frame.messages]
        taken_before = margin + GAP + ARROWS * any(at < 0 for _, _, at in messages)
        bands: list[list[ColumnRun]] = []
        taken, stop, wide = 0.0, 0, 0.0
        for number, group in enumerate(explanation.columns):
            first, stop = stop, stop + len(group.names)
            if groups and number not in groups:
                continue
            while first < stop:
                if not bands or taken + sum(widths[first:stop]) > room:
                    bands.append([])
                    taken = taken_before
                fitting = [
                    n for n in range(first + 1, stop + 1) if taken + sum(widths[first:n]) <= room
                ]
                last = max(fitting, default=first + 1)
                bands[-1].append(ColumnRun(group.heading, first, last))
                taken, first = taken + sum(widths[first:last]) + GAP, last
                wide = max(wide, taken)
        height = LINE * (1.2 + len(bands) * (len(explanation.rows) + 2.4))
        return cls(margin, widths, bands, (wide, height))


def draw_for_a_wall(explanation: Explanation, path: Path, language: str) -> tuple[str, list[Path]]:
    """Draw an explanation in pictures of 1280 x 720, with text that is read from far away.

    First come matrices that are cut, or the chart that `plan` draws, then the frames, with the legend
    below each and the formulas below the last. A frame that is too large is drawn in parts: the
    groups of columns that have changed, each in pictures of its own if need be.

    returns  the language of the texts, and the files: NAME-1.png and so on
    raises   OSError if a file cannot be written
    """
    language, files = drawn_in(language), list[Path]()

    def file() -> Path:
        return path.with_name(f"{path.stem}-{len(files) + 1}{path.suffix}")

    for product in range(len(explanation.products)):
        files.append(file())
        draw_product(explanation, product, files[-1], language)
    if explanation.chart:
        files += explanation.chart(file())
    for number in explanation.stills:
        for percent, layout in fitted(explanation, language, number):
            files.append(file())
            draw_frame(explanation, number, files[-1], language, percent, layout)
    return language, files


def drawn_in(language: str) -> str:
    """Return the language of pictures: English if no font has the letters of the language."""
    return language if language != "ko" or hangul_font() else "en"


def draw_one(explanation: Explanation, path: Path) -> None:
    """Draw the English picture that stands for an explanation on a page.

    This is its chart or first product, or else the frame that changes most cells.
    """
    if explanation.chart:
        explanation.chart(path)
    elif explanation.products:
        draw_product(explanation, 0, path, "en")
    else:
        frames = explanation.frames
        number = max(
            explanation.stills[1:], key=lambda n: len(frames[n].changed(frames[n - 1])), default=0
        )
        draw_frame(explanation, number, path, "en", *fitted(explanation, "en", number)[0])


def draw_frame(
    explanation: Explanation,
    number: int,
    path: Path,
    language: str,
    percent: int,
    layout: FrameLayout,
) -> None:
    """Draw a frame, or a part of it, and below it as much of the notes as there is room for."""
    wide, high = (100 * inches / percent for inches in WALL)
    notes = notes_of(explanation, language, int((wide - 0.3) / CHARACTER))
    if number != explanation.stills[-1]:
        notes = _legend(explanation, language, wide)
    free = high - HEAD - layout.panel[1] - LINE * (len(notes) + 0.8)
    if free < 0:
        free, notes = high - HEAD - layout.panel[1], []
    rows = layout.panel[1] / LINE - 1.2
    layout = layout._replace(row=LINE * min(TALLEST, 1 + free / LINE / rows))
    with _page(explanation, path, language, (wide, high), percent) as axes:
        frame = explanation.frames[number]
        _panel(axes, explanation, (number, frame), (0.0, HEAD), layout, language)
        _notes(axes, notes, high - LINE * (len(notes) + 0.4))


def draw_product(explanation: Explanation, number: int, path: Path, language: str) -> None:
    title, matrices = explanation.products[number]
    size = tuple(100 * inches / READABLE for inches in WALL)
    with _page(explanation, path, language, size, READABLE) as axes:
        _product(axes, text(title, language), matrices, language)


def fitted(explanation: Explanation, language: str, number: int) -> list[tuple[int, FrameLayout]]:
    """Return the pictures that a frame needs, of each the scale in %, and the layout.

    number  of the frame
    """
    whole = _largest(explanation, language, ())
    frame, at = explanation.frames[number], 0
    changed = (
        {column for _, column in frame.changed(explanation.frames[number - 1])} if number else set()
    )
    groups = []
    for group, columns in enumerate(explanation.columns):
        own = range(at, at + len(columns.names))
        is_empty = not any(cells[column] for cells in frame.cells for column in own)
        if changed & {*own} if changed else not is_empty:
            groups.append(group)
        at += len(columns.names)
    is_small = len(explanation.columns) <= TOGETHER
    if whole[0] >= READABLE and (is_small or not groups):
        return [whole]
    together = _largest(explanation, language, groups)
    if together[0] >= READABLE:
        return [together]
    pictures = list[tuple[int, FrameLayout]]()
    for group in groups:
        percent, layout = _largest(explanation, language, [group])
        if percent < READABLE:  # Each band of columns, if it has changed, is a picture.
            room = 100 * WALL[0] / READABLE
            layout = FrameLayout.of(explanation, language, room, [group])
            pictures += [
                (READABLE, layout._replace(bands=[band]))
                for band in layout.bands
                if not changed or any(changed & {*range(run.first, run.stop)} for run in band)
            ]
        else:
            pictures.append((percent, layout))
    return pictures


def _largest(
    explanation: Explanation, language: str, groups: Collection[int]
) -> tuple[int, FrameLayout]:
    """Return the largest scale, in %, at which these groups fit a picture for a wall, and the layout.

    A group is cut into bands, and the legend is left out, only if the texts are too small else.
    """
    for has_legend in (True, False):
        fitting = []
        for percent in range(MOST, 20, -5):
            wide, high = (100 * inches / percent for inches in WALL)
            legend = _legend(explanation, language, wide) if has_legend else []
            layout = FrameLayout.of(explanation, language, wide, groups)
            free = high - HEAD - LINE * (len(legend) + 0.8) * has_legend
            if layout.panel[0] <= wide and layout.panel[1] <= free:
                fitting.append((percent, layout))
                is_whole = sum(map(len, layout.bands)) == (len(groups) or len(explanation.columns))
                if is_whole or percent <= READABLE:
                    break
        if fitting and fitting[-1][0] >= READABLE and is_whole:
            return fitting[-1]
    return fitting[0]


def _legend(explanation: Explanation, language: str, wide: float) -> list[str]:
    return wrapped(text(explanation.legend, language), int((wide - 0.3) / CHARACTER))


@contextmanager
def _page(
    explanation: Explanation, path: Path, language: str, size: Sequence[float], dpi: int
) -> Iterator[Any]:
    """Yield the axes of a picture with its title, in inches from the top left corner; then save it."""
    pyplot, title = painter(), text(explanation.title, language)
    fonts = [(language == "ko" and hangul_font()) or "DejaVu Sans", "DejaVu Sans"]
    with pyplot.rc_context({"font.family": fonts}):  # A font with Hangul may lack signs.
        figure = pyplot.figure(figsize=size)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, size[0]), ylim=(size[1], 0))
        axes.axis("off")
        # A character of the largest title takes 1.5 CHARACTER.
        points = min(13.0, 13 * (size[0] - 0.3) / (1.5 * CHARACTER * width(title)))
        axes.text(0.15, HEAD / 2, title, va="center", fontsize=points, weight="bold")
        yield axes
        save(figure, path, dpi)


def notes_of(explanation: Explanation, language: str, columns: int) -> list[str]:
    notes = [text(explanation.legend, language)]
    notes += [formula_line(formula, language) for formula in explanation.formulas]
    return [line for note in notes for line in wrapped(note, columns)]


def _notes(axes: Any, notes: Sequence[str], top: float) -> None:
    for row, note in enumerate(notes):
        axes.text(0.15, top + LINE * (row + 0.4), note, va="center", fontsize=9, color=TEXT)


def _widths(explanation: Explanation, language: str) -> list[float]:
    """Return the inches of each column: enough for its contents and for the heading of its group."""
    arrows = 0.3 * any(at >= 0 for frame in explanation.frames for _, _, at in frame.messages)
    widths: list[float] = []
    largest = dict[tuple[str, ...], float]()  # of groups with the same names
    for group in explanation.columns:
        first, names = len(widths), group.named(language)
        lengths = [
            max(
                width(name),
                *(len(cells[at]) for frame in explanation.frames for cells in frame.cells),
            )
            for at, name in enumerate(names, first)
        ]
        inches = [CHARACTER * (1.4 + length) + arrows for length in lengths]
        short = CHARACTER * width(text(group.heading, language)) - sum(inches)
        widths += [column + max(0.0, short) / len(inches) for column in inches]
        largest[names] = max(*widths[first:], largest.get(names, 0.0))
    at = 0
    for group in explanation.columns:  # Columns of one name stand below each other.
        names = group.named(language)
        if (
            len(names) > 1
            and sum(other.named(language) == names for other in explanation.columns) > 1
        ):
            widths[at : at + len(names)] = [largest[names]] * len(names)
        at += len(names)
    return widths


def _product(axes: Any, title: str, matrices: Sequence[CutMatrix], language: str) -> None:
    """Draw matrices beside each other, to scale, with their parts in colours."""
    from matplotlib.patches import Rectangle

    wide, high = (100 * inches / READABLE for inches in WALL)
    axes.text(0.15, HEAD + LINE * 0.7, title, va="center", fontsize=10)
    sides = wide - 0.6 * len(matrices) - 0.3, high - HEAD - 4.5 * LINE
    dims = [sum(m.shape[1] for m in matrices), max(m.shape[0] for m in matrices)]
    unit = min(side / dim for side, dim in zip(sides, dims, strict=True))
    x, top = 0.2, HEAD + 2.5 * LINE
    middle = top + unit * dims[1] / 2
    for matrix in matrices:
        axes.text(x + 0.1, middle, matrix.sign, va="center", ha="center", fontsize=16)
        x, y = x + 0.3, middle - unit * matrix.shape[0] / 2
        for row, column, rows, columns, label, number in [
            (0, 0, *matrix.shape, "", -1),
            *matrix.parts,
        ]:
            place, part = (x + unit * column, y + unit * row), (unit * columns, unit * rows)
            axes.add_patch(Rectangle(place, *part, facecolor=PARTS[number], edgecolor="#707070"))
            centre = {"x": place[0] + part[0] / 2, "y": place[1] + part[1] / 2}
            shown = text(label, language) if label else ""
            room = int(part[0] / CHARACTER * 9 / LABEL)
            turned = 90 * (max(map(width, shown.split()), default=0) > room)
            shown = shown if turned else "\n".join(wrapped(shown, max(1, room)))
            axes.text(s=shown, va="center", ha="center", fontsize=LABEL, rotation=turned, **centre)
        across = unit * matrix.shape[1]
        below = y + unit * matrix.shape[0] + LINE
        axes.text(x + across / 2, below, matrix.name, va="center", ha="center", fontsize=LABEL)
        x += across + 0.3


def _panel(
    axes: Any,
    explanation: Explanation,
    numbered: tuple[int, Frame],
    corner: tuple[float, float],
    layout: FrameLayout,
    language: str,
) -> None:
    """Draw a frame, with its number, at `corner` (left and top, in inches)."""
    from matplotlib.patches import FancyArrowPatch, Rectangle

    (left, top), (number, frame) = corner, numbered
    changed = frame.changed(explanation.frames[number - 1] if number else None)
    most = max(summands(cell) for each in explanation.frames for row in each.cells for cell in row)
    names = [name for group in explanation.columns for name in group.named(language)]
    places: dict[int, tuple[float, float]] = {}  # of columns: the right end, and the top
    axes.text(left + 0.15, top + LINE * 0.7, frame_title(frame, language), va="center", fontsize=10)
    for band in layout.bands:
        x = left + layout.margin
        for run in band:
            heading = {"x": x, "y": top + LINE * 1.6, "s": text(run.heading, language)}
            axes.text(**heading, va="center", fontsize=8, style="italic")
            for column in range(run.first, run.stop):
                wide = layout.widths[column]
                middle = {"x": x + wide / 2, "va": "center", "ha": "center"}
                axes.text(y=top + LINE * 2.4, s=names[column], fontsize=8, **middle)
                for row, cells in enumerate(frame.cells):
                    y = top + LINE * 2.9 + layout.row * row
                    is_changed = (row, column) in changed
                    edge, line, order = (CHANGED, 1.8, 3) if is_changed else ("#c8c8c8", 0.6, 2)
                    look: dict[str, Any] = {"edgecolor": edge, "linewidth": line, "zorder": order}
                    box = Rectangle((x + 0.01, y + 0.01), wide - 0.02, layout.row - 0.02, **look)
                    box.set_facecolor(colour(cells[column], most))
                    axes.add_patch(box)
                    style = {"family": "DejaVu Sans Mono", "color": TEXT, "zorder": 4}
                    axes.text(
                        y=y + layout.row / 2, s=cells[column], fontsize=8.5, **style, **middle
                    )
                x += wide
                places[column] = x - 0.1, top
            x += GAP
        for row, label in enumerate(explanation.rows):
            y = top + LINE * 2.9 + layout.row * (row + 0.5)
            align = {"x": left + layout.margin - 0.08, "va": "center", "ha": "right"}
            axes.text(y=y, s=text(label, language), fontsize=9, **align)
        top += LINE * 2.4 + layout.row * len(explanation.rows)
    places[-1] = x, corner[1]
    for source, target, column in frame.messages:
        if column not in places:  # drawn in another picture
            continue
        end, above = places[column]
        rows = [above + LINE * 2.9 + layout.row * (row + 0.5) for row in (source, target)]
        bend = min(0.6, 0.7 / abs(rows[1] - rows[0])) * (0.3 if column >= 0 else 1)
        look = {"arrowstyle": "-|>", "mutation_scale": 9, "color": CHANGED, "zorder": 5}
        look["connectionstyle"] = f"arc3,rad={-bend if target > source else bend}"
        axes.add_patch(FancyArrowPatch((end, rows[0]), (end, rows[1]), **look))
