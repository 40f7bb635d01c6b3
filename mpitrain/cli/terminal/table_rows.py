"""The rows of a table, printed while it is measured, with a bar for the remaining time."""

import sys

from mpitrain.cli.terminal.progress import bar


class RowPrinter:
    """A printer of table rows; on a terminal a bar below them shows the time left."""

    def __init__(self, total: int, unit: str = "rows"):
        """Start the bar.

        total  upper bound of the number of rows, or of other units, that will be measured
        unit   the noun for one of them, in the bar
        """
        form = "{percentage:3.0f}% |{bar}| {n}/{total} " + unit + ", {remaining} left"
        self._bar = bar(total, form=form)

    def say(self, text: str) -> None:
        """Print lines above the bar."""
        self._bar.write(text, file=sys.stdout)
        sys.stdout.flush()

    def row(self, text: str) -> None:
        """Advance the bar and print the line of a measured row."""
        self.count()
        self.say(text)

    def count(self) -> None:
        """Advance the bar by one unit without printing a line."""
        self._bar.n += 1
        self._bar.refresh()

    def close(self) -> None:
        self._bar.leave = False
        self._bar.close()
