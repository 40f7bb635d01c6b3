"""How wide a terminal is, for charts that fill it."""

import shutil
import textwrap
from collections.abc import Iterable

NARROWEST, WIDEST, PIPED = 80, 130, 100
"""Columns of a chart: those of the terminal within bounds, and where there is none."""


def columns() -> int:
    return min(max(shutil.get_terminal_size((PIPED, 24)).columns, NARROWEST), WIDEST)


def filled(sentences: Iterable[str]) -> list[str]:
    """Sentences in lines that fit the terminal."""
    return [
        line
        for text in sentences
        for line in textwrap.wrap(text, columns(), subsequent_indent="  ")
    ]
