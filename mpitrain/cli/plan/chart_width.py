"""The width of charts that fill the terminal."""

import shutil
import textwrap
from collections.abc import Iterable

NARROWEST, WIDEST, PIPED = 80, 130, 100
"""Columns of a chart: least, most, and without a terminal."""


def columns() -> int:
    return min(max(shutil.get_terminal_size((PIPED, 24)).columns, NARROWEST), WIDEST)


def filled(sentences: Iterable[str]) -> list[str]:
    return [
        line
        for text in sentences
        for line in textwrap.wrap(text, columns(), subsequent_indent="  ")
    ]
