"""The rows of a table that is printed while it is measured, and a bar that says how long the rest takes."""

import sys

from mpitrain.cli.terminal.progress import bar


class Rows:
    """Prints rows on standard output; on a terminal a bar below them shows the time left."""

    def __init__(self, total: int, unit: str = "rows"):
        """total: rows, or other units, that will be measured, at most."""
        form = "{percentage:3.0f}% |{bar}| {n}/{total} " + unit + ", {remaining} left"
        self._bar = bar(total, form=form)

    def say(self, text: str) -> None:
        """Print lines above the bar."""
        self._bar.write(text, file=sys.stdout)
        sys.stdout.flush()

    def row(self, text: str) -> None:
        """Print the line of a row that has been measured."""
        self.count()
        self.say(text)

    def count(self) -> None:
        """Count a unit that has been measured and has no line."""
        self._bar.n += 1
        self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.leave = False
        self._bar.close()
