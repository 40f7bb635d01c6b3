"""Tables with as many columns as fit the terminal, and figures of three significant digits."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class TableColumn(NamedTuple):
    """One column of a table.

    width       characters, without the space before it
    text        (row) -> text of the row's cell
    importance  if the table is too wide, columns with the lowest are left out first; None: never
    is_left     whether the text is left-aligned
    """

    title: str
    unit: str
    width: int
    text: Callable[[Any], str]
    importance: int | None = None
    is_left: bool = False

    def cell(self, text: str) -> str:
        return f" {text}".ljust(self.width) if self.is_left else text.rjust(self.width)


class RowFormatter:
    """A formatter of rows under column titles.

    width  characters of the terminal; 0: no limit
    """

    def __init__(self, columns: Sequence[TableColumn], width: int = 0):
        self.columns = fitting(columns, width)
        self._left_out = [column.title for column in columns if column not in self.columns]

    def heading(self) -> list[str]:
        """Return the lines of titles and units, after a note on the columns left out."""
        titles = [
            " ".join(
                column.cell(text) for column, text in zip(self.columns, texts, strict=True)
            ).rstrip()
            for texts in (
                [column.title for column in self.columns],
                [column.unit for column in self.columns],
            )
        ]
        if not self._left_out:
            return titles
        return [
            f"# left out here: {', '.join(self._left_out)}",
            "# --wide prints them all; --csv and --json write them all",
            "",
            *titles,
        ]

    def line(self, row: Any) -> str:
        return " ".join(column.cell(column.text(row)) for column in self.columns).rstrip()


def fitting(columns: Sequence[TableColumn], width: int) -> list[TableColumn]:
    """Return the columns that fit the width, in their order; all if the width is 0."""
    kept = list(columns)
    while width and sum(column.width + 1 for column in kept) - 1 > width:
        left = [column for column in kept if column.importance is not None]
        if not left:
            break
        kept.remove(min(left, key=lambda column: column.importance or 0))
    return kept


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
