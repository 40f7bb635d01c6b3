"""What rank 0 prints row by row: on a terminal with a bar below the rows that says how long the rest takes."""

import os
import sys
from typing import Any

from tqdm import tqdm

from mpitrain.cli import OUTPUT_TERMINAL
from mpitrain.cli.progress import terminal

USUAL = 80
"""Columns of a terminal that does not tell."""


def output_columns() -> int:
    """Columns of the terminal behind standard output; 0 if there is none."""
    if OUTPUT_TERMINAL in os.environ:  # mpirun hands a pipe or a terminal of its own to its ranks: `mpitrain launch` knows
        return int(os.environ[OUTPUT_TERMINAL] or 0)
    if not sys.stdout.isatty():
        return 0
    return os.get_terminal_size(sys.stdout.fileno()).columns  # 0 of the one that mpirun makes, whatever is behind it


class Rows:
    """Prints lines on standard output, and a bar of the rows still to be measured on a terminal.

    The bar goes through the stream of the lines where that is a terminal, so that launchers keep both in order, else
    through standard error. Through pipes there is no bar.
    """

    def __init__(self, total: int, unit: str = "rows"):
        """total: rows, or other units, that will be measured, at most."""
        columns = output_columns()
        self._is_beside = bool(columns)
        self._bar: tqdm[Any] = tqdm(
            total=total, disable=not columns and terminal() == 0, leave=False, file=sys.stdout if columns else sys.stderr,
            ncols=(columns or terminal() or USUAL) - 1, nrows=24,  # a terminal that mpirun makes says that it has one row
            bar_format="{percentage:3.0f}% |{bar}| {n}/{total} " + unit + ", {remaining} left")

    def say(self, text: str) -> None:
        """Print lines above the bar."""
        if self._is_beside:
            self._bar.clear()
        print(text, flush=True)
        self._bar.refresh()

    def row(self, text: str) -> None:
        """Print the line of a row that has been measured."""
        self._bar.n += 1
        self.say(text)

    def count(self) -> None:
        """One more unit is measured, and has no line."""
        self._bar.n += 1
        self._bar.refresh()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()
