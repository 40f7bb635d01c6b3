"""Pictures of explanations: each frame is a table of coloured cells. `draw` needs matplotlib."""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.plots import WALL, painter, save
from mpitrain.tools.plan.collective_picture import draw as draw_collective
from mpitrain.tools.textbook.explain.explanation import CutMatrix, Explanation, Frame
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
READABLE, MOST = 165, 240
"""Scales in %: from the first on, all texts of a picture for a wall have 13 points or more; the
second is the largest.
"""
WIDEST = 13.0
"""Largest width of a picture, in inches."""
LABEL = 12
"""Points of the labels of a matrix."""
PARTS = ("#9fd3f2", "#f5c26b", "#7fcbb0", "#e3bcd2", "#d9f0d3", "#eeeeee")
"""Colours of the parts of a matrix; the last is that of a part without a number."""


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
    """

    margin: float
    widths: list[float]
    bands: list[list[ColumnRun]]
    panel: tuple[float, float]

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
        messages = [message for _, frame in explanation.drawn for message in frame.messages]
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


def draw(explanation: Explanation, path: Path, language: str, dpi: int = 100) -> str:
    """Draw all frames in one picture, and return the language of the texts.

    This is English if no font has the letters of the language.

    dpi     pixels of an inch
    raises  OSError if the file cannot be written
    """
    language = language if language != "ko" or hangul_font() else "en"
    layout = FrameLayout.of(explanation, language, math.inf)
    frames = explanation.drawn
    longest = max(width(frame_title(frame, language)) for _, frame in frames)
    panel = max(layout.panel[0], TITLE_CHARACTER * (2 + longest))
    across = max(1, min(len(frames), int(WIDEST / panel)))
    wide = max(across * panel, 7.5)
    notes = notes_of(explanation, language, int((wide - 0.3) / CHARACTER))
    below = HEAD + -(-len(frames) // across) * layout.panel[1]
    with _page(explanation, path, language, (wide, below + LINE * (len(notes) + 0.8)), dpi) as axes:
        for at, frame in enumerate(frames):
            corner = (at % across * panel, HEAD + at // across * layout.panel[1])
            _panel(axes, explanation, frame, corner, layout, language)
        _notes(axes, notes, below)
    return language


def draw_for_a_wall(explanation: Explanation, path: Path, language: str) -> tuple[str, list[Path]]:
    """Draw each frame as a picture of 1280 x 720, with text that is read from far away.

    Before the frames there are pictures with the idea, the legend and the formulas, then those of
    matrices that are cut, or of a collective. A frame that is too large is drawn in parts: the
    groups of columns that have changed, each in pictures of its own if need be.

    returns  the language of the texts, and the files: NAME-1.png and so on
    raises   OSError if a file cannot be written
    """
    is_drawn = language != "ko" or bool(hangul_font())
    language, files = language if is_drawn else "en", list[Path]()

    def page(percent: int = READABLE) -> Any:
        files.append(path.with_name(f"{path.stem}-{len(files) + 1}{path.suffix}"))
        size = tuple(100 * inches / percent for inches in WALL)
        return _page(explanation, files[-1], language, size, percent)

    said = [*explanation.sentences, *([] if is_drawn else ["", NO_HANGUL])]
    for percent in range(MOST, READABLE - 1, -5):  # The largest at which one page holds all.
        columns = int((100 * WALL[0] / percent - 0.3) / CHARACTER)
        notes = [part for each in said for part in wrapped(text(each, language), columns) or [""]]
        notes += ["", *notes_of(explanation, language, columns)]
        most = int((100 * WALL[1] / percent - HEAD) / LINE - 0.8)
        if len(notes) <= most:
            break
    most = -(-len(notes) // -(-len(notes) // most))  # Several pages are equally full.
    for at in range(0, len(notes), most):
        with page(percent) as axes:
            _notes(axes, notes[at : at + most], HEAD)
    for title, matrices in explanation.products:
        with page() as axes:
            _product(axes, text(title, language), matrices, language)
    if explanation.plan:
        file = path.with_name(f"{path.stem}-{len(files) + 1}{path.suffix}")
        files += draw_collective(explanation.plan, file)
    for number, frame in explanation.drawn:
        for percent, layout in fitted(explanation, language, number):
            with page(percent) as axes:
                _panel(axes, explanation, (number, frame), (0.0, HEAD), layout, language)
    return language, files


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
        if not changed or changed & {*range(at, at + len(columns.names))}:
            groups.append(group)
        at += len(columns.names)
    if whole[0] >= READABLE or not groups:
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

    A group is cut into bands only if its texts are too small else.
    """
    fitting = []
    for percent in range(MOST, 20, -5):
        wide, high = (100 * inches / percent for inches in WALL)
        layout = FrameLayout.of(explanation, language, wide, groups)
        if layout.panel[0] <= wide and layout.panel[1] <= high - HEAD:
            fitting.append((percent, layout))
            is_whole = sum(map(len, layout.bands)) == (len(groups) or len(explanation.columns))
            if is_whole or percent <= READABLE:
                break
    return fitting[-1] if is_whole and fitting[-1][0] >= READABLE else fitting[0]


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
    frames = [frame for _, frame in explanation.drawn]
    arrows = 0.3 * any(at >= 0 for frame in frames for _, _, at in frame.messages)
    widths: list[float] = []
    for group in explanation.columns:
        first = len(widths)
        lengths = [
            max(width(name), *(len(cells[at]) for frame in frames for cells in frame.cells))
            for at, name in enumerate(group.named(language), first)
        ]
        inches = [CHARACTER * (1.4 + length) + arrows for length in lengths]
        short = CHARACTER * width(text(group.heading, language)) - sum(inches)
        widths += [column + max(0.0, short) / len(inches) for column in inches]
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
    is_first = not number or explanation.pictured
    changed = frame.changed(None if is_first else explanation.frames[number - 1])
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
                    y = top + LINE * (row + 2.9)
                    is_changed = (row, column) in changed
                    edge, line, order = (CHANGED, 1.8, 3) if is_changed else ("#c8c8c8", 0.6, 2)
                    look: dict[str, Any] = {"edgecolor": edge, "linewidth": line, "zorder": order}
                    box = Rectangle((x + 0.01, y + 0.01), wide - 0.02, LINE - 0.02, **look)
                    box.set_facecolor(colour(cells[column], most))
                    axes.add_patch(box)
                    style = {"family": "DejaVu Sans Mono", "color": TEXT, "zorder": 4}
                    axes.text(y=y + LINE / 2, s=cells[column], fontsize=8.5, **style, **middle)
                x += wide
                places[column] = x - 0.1, top
            x += GAP
        for row, label in enumerate(explanation.rows):
            y = top + LINE * (row + 3.4)
            align = {"x": left + layout.margin - 0.08, "va": "center", "ha": "right"}
            axes.text(y=y, s=text(label, language), fontsize=9, **align)
        top += LINE * (len(explanation.rows) + 2.4)
    places[-1] = x, corner[1]
    for source, target, column in frame.messages:
        if column not in places:  # drawn in another picture
            continue
        end, above = places[column]
        rows = [above + LINE * (row + 3.4) for row in (source, target)]
        bend = min(0.6, 0.7 / abs(rows[1] - rows[0])) * (0.3 if column >= 0 else 1)
        look = {"arrowstyle": "-|>", "mutation_scale": 9, "color": CHANGED, "zorder": 5}
        look["connectionstyle"] = f"arc3,rad={-bend if target > source else bend}"
        axes.add_patch(FancyArrowPatch((end, rows[0]), (end, rows[1]), **look))
