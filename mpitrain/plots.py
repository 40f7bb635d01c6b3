"""The look of all pictures, by matplotlib: style, colours, titles, legends, units; checks of the file, and saving."""

import io
import logging
import re
import textwrap
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import ConfigError, say
from mpitrain.files import check_writable, whole

COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#000000", "#7f7f7f"),
)
"""Colours of curves: those of Okabe and Ito, which colour-blind readers distinguish, and grey."""
PHASES = {"F": "#56b4e9", "B": "#e69f00", "W": "#009e73", "BW": "#cc79a7"}
"""{computation of a pipeline: colour}: forward, input half and weight half of backward, both at once."""
WALL = 12.8, 7.2
"""Inches of a picture for a wall: 1280 x 720 pixels, 100 of which are an inch."""
TITLE = 96
"""Characters of a line of a title."""
DASHES, MARKS = ("-", "--", "-.", (0, (3, 1, 1, 1, 1, 1))), "os^D"
"""Dashes and marks of the first eight curves, of the second eight, and so on."""
LEGEND = 12.5
"""Points of a legend, if it has room."""
STYLE = {
    "font.size": 15,
    "axes.titlesize": "medium",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.titlesize": "medium",
    "grid.alpha": 0.3,
    "legend.fontsize": LEGEND,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}
"""What all pictures have in common."""


def painter() -> Any:
    """Return matplotlib's pyplot with our style and the Agg backend, which needs no display.

    Warnings of matplotlib, such as that of a missing font cache folder, are silenced.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(STYLE)
    return pyplot


def check_drawable(path: Path, option: str = "--plot") -> None:
    """Raise ConfigError unless matplotlib is installed, knows the format, and can write there."""
    try:
        painter()
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ConfigError(
            f"{option} needs matplotlib, which is not installed.", "pip install 'mpitrain[report]'"
        ) from None
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigError(
            f"{option} draws files that end in {', '.join(sorted(known))}, but this is {path}.",
            "Name it rows.png.",
        )
    check_writable(path)


def subplots(rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure for a wall and its axes; an array of them if there are several."""
    return painter().subplots(rows, columns, figsize=WALL, layout="constrained")


def save(figure: Any, path: Path, dpi: int = 100) -> None:
    """Save a figure atomically, in the format of the file's suffix, and close it.

    Names of runs may have letters that the usual font lacks: another font draws them, or a note says
    that none has them.

    raises  OSError if the file cannot be written
    """
    kind, drawn = path.suffix.removeprefix(".").lower(), io.BytesIO()
    try:
        if letters := _draw(figure, drawn, kind, dpi):
            if font := font_with(letters):
                for text in figure.findobj(painter().Text):
                    text.set_fontfamily([*text.get_fontfamily(), font])
                drawn = io.BytesIO()
                _draw(figure, drawn, kind, dpi)
            else:
                say(
                    f"note: no font of this machine has {letters}, which {path.name} shows as boxes: install one "
                    "such as fonts-noto-cjk"
                )
        with whole(path) as file:
            file.write(drawn.getbuffer())
    finally:
        painter().close(figure)


def _draw(figure: Any, file: io.BytesIO, kind: str, dpi: int) -> str:
    """Draw into a file, and return the letters that no chosen font has; matplotlib warns of each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(file, format=kind, dpi=dpi)
    letters = ""
    for warning in caught:
        if match := re.match(r"Glyph (\d+) .* missing from ", str(warning.message)):
            letters += chr(int(match[1])) * (chr(int(match[1])) not in letters)
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    return letters


def font_with(letters: str) -> str | None:
    """Return the name of a font of this machine that has all of these letters, or None."""
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font

    for font in sorted(fontManager.ttflist, key=lambda font: font.name):
        if font.name.startswith("Last Resort"):
            continue  # It draws a box for each letter.
        with suppress(OSError, RuntimeError):
            if {*map(ord, letters)} <= FT2Font(font.fname).get_charmap().keys():
                return str(font.name)
    return None


def numbered(path: Path, count: int) -> list[Path]:
    """Return the files of `count` pictures: the path itself, or NAME-1.png, NAME-2.png and so on."""
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{number + 1}{path.suffix}") for number in range(count)]


class Look(NamedTuple):
    """The style of a curve."""

    colour: str
    dash: Any
    mark: str


def look(number: int) -> Look:
    """Return the style of a curve by its number; the first 32 styles all differ."""
    again = number // len(COLOURS) % len(DASHES)
    return Look(COLOURS[number % len(COLOURS)], DASHES[again], MARKS[again])


def legible(name: str) -> str:
    """Return a path as a matplotlib label, with escapes for bytes that are not UTF-8.

    matplotlib hides labels that begin with an underscore, so such a path begins with "./".
    """
    return ("./" if name.startswith("_") else "") + name.encode(
        "utf-8", "backslashreplace"
    ).decode()


def titled(names: Iterable[str]) -> str:
    """Return a title with the names of runs, or the first three and the number of others."""
    shown = [*map(legible, names)]
    return wrapped(
        ", ".join(shown if len(shown) <= 4 else [*shown[:3], f"and {len(shown) - 3} more"])
    )


def wrapped(title: str) -> str:
    """Return a title in lines that the picture has room for, at most three."""
    lines = (
        textwrap.fill(line, TITLE, break_on_hyphens=False, max_lines=3, placeholder=" ...")
        for line in title.split("\n")
    )
    return "\n".join(lines)


def add_legend(figure: Any, axes: Any, title: str = "") -> None:
    """Add the legend of the axes below the picture, in which a dollar sign stays a dollar sign."""
    handles, labels = axes.get_legend_handles_labels()
    longest = 6 + max(map(len, labels))

    def points(columns: int) -> float:
        """Return the size at which so many columns have room, in at most the height of 8 lines."""
        across = 72 * WALL[0] / (0.6 * columns * longest)
        return min(LEGEND, across, LEGEND * 8 / -(-len(labels) // columns))

    columns = max(range(1, 5), key=lambda number: (points(number), number))
    texts = {"fontsize": points(columns), "title": title, "title_fontsize": "x-small"}
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, **texts)
    for text in legend.get_texts():
        text.set_parse_math(False)


def set_byte_ticks(axes: Any, sizes: list[int], label: str) -> None:
    """Make a logarithmic x axis of bytes, with at most six of these sizes named as 4 KiB."""
    ticks = sizes[:: -(-len(sizes) // 6)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels=[readable(nbytes) for nbytes in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.grid()


def readable(nbytes: int) -> str:
    """Format a number of bytes as 64 B, 4 KiB or 1.5 MiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= 0.99 * size:  # arrays are rounded down to whole elements per rank
            return f"{round(nbytes / size, 2):.3g} {unit}"
    return f"{nbytes} B"
