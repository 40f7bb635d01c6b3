"""Text tables: columns of fixed widths, as many as fit the terminal; numbers of three significant digits."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class TextColumn(NamedTuple):
    """A column of a table.

    form        alignment (`<`; otherwise to the right), width, and format of numbers: `<18`, `9.1f`
    cell        the value in a row: name of a field, an index, or a function of the row. Text is
                printed as it is; None and NaN are "-"
    gap         spaces before the column, unless it is the first
    unit        second line of the heading, if any column has one
    importance  if the table is too wide, columns with the lowest are left out first; None: never
    """

    title: str
    form: str
    cell: str | int | Callable[[Any], Any]
    gap: int = 1
    unit: str = ""
    importance: int | None = None

    @property
    def width(self) -> int:
        return int(_parts(self.form)[1] or 0)

    def aligned(self, value: Any) -> str:
        align, width, number = _parts(self.form)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            value = "-"
        text = value if isinstance(value, str) else format(value, number)
        return f"{text:{align or '>'}{width}}"

    def text(self, row: Any) -> str:
        if callable(self.cell):
            return self.aligned(self.cell(row))
        return self.aligned(
            row[self.cell] if isinstance(self.cell, int) else getattr(row, self.cell)
        )


class TextTable:
    """Rows as lines of text.

    width  characters of the terminal; 0: no limit
    """

    def __init__(self, columns: Sequence[TextColumn], width: int = 0):
        self.columns = [*columns]
        self._left_out: list[str] = []
        while width and self._width() > width:
            optional = [column for column in self.columns if column.importance is not None]
            if not optional:
                break
            self.columns.remove(min(optional, key=lambda column: column.importance or 0))
        self._left_out = [column.title for column in columns if column not in self.columns]

    def heading(self) -> list[str]:
        """Return the lines of titles and units, below a note on columns that were left out."""
        lines = [self._joined(column.aligned(column.title) for column in self.columns)]
        if any(column.unit for column in self.columns):
            lines.append(self._joined(column.aligned(column.unit) for column in self.columns))
        if not self._left_out:
            return lines
        return [
            f"# left out here: {', '.join(self._left_out)}",
            "# --wide prints them all; --csv and --json write them all",
            "",
            *lines,
        ]

    def line(self, row: Any) -> str:
        return self._joined(column.text(row) for column in self.columns)

    def lines(self, rows: Iterable[Any]) -> list[str]:
        """Return the heading and a line for each row."""
        return [*self.heading(), *map(self.line, rows)]

    def _width(self) -> int:
        return sum(column.gap + column.width for column in self.columns) - self.columns[0].gap

    def _joined(self, cells: Iterable[str]) -> str:
        gaps = [0, *(column.gap for column in self.columns[1:])]
        return "".join(" " * gap + cell for gap, cell in zip(gaps, cells, strict=True)).rstrip()


def marked(text: str, is_marked: bool) -> str:
    """Return the text with ~ behind it if other work spoilt the value, else with a space."""
    return text + ("~" if is_marked else " ")


def figure(value: float) -> str:
    """Format a number with three significant digits (0.0123, 1.23, 12300); "-" if not finite."""
    if not math.isfinite(value):
        return "-"
    rounded = float(f"{value:.3g}")
    if rounded == 0:
        return "0"
    if abs(rounded) < 0.001:
        return f"{rounded:.2e}"
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def _parts(form: str) -> tuple[str, str, str]:
    """Split a form such as `<18` or `9.1f` into alignment, width and format of numbers."""
    match = re.fullmatch(r"([<>]?)(\d*)(.*)", form)
    assert match
    return match[1], match[2], match[3]
