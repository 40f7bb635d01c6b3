"""The colour of a cell, by its contents: shared by pictures and pages."""

import re

EMPTY, CHANGED, TEXT = "#f4f4f4", "#d55e00", "#1a1a1a"
"""Colours of a cell without contents, of the frame around a changed cell, and of text."""
INFINITE = "#f4b6b6"
"""Of a number that is too large."""
SHADES = ("#ffffff", "#d9f0d3", "#a6dba0", "#7fc97f", "#5aae61")
"""From one summand to all that any cell of the topic has."""
KINDS = {"F": "#9fd3f2", "BW": "#e3bcd2", "B": "#f5c26b", "W": "#7fcbb0"}
"""Of instructions of a pipeline."""


def summands(cell: str) -> int:
    """Return the number of symbols in a cell, of those that are written."""
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
