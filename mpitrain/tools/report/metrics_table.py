"""Metrics of several runs as one table: a row for each logged step, a column for each series."""

import csv
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from mpitrain.errors import visible
from mpitrain.run.metrics import Row
from mpitrain.tools.text_table import TextColumn, TextTable

EXACT = 2**53
"""Every whole number below it is a float."""
SHOWN = {
    "step": ",.0f",
    "loss": ".4f",
    "val_loss": ".4f",
    "val_bits_per_byte": ".4f",
    "val_accuracy": ".1%",
    "lr": ".2e",
    "grad_norm": ".3f",
    "imbalance": ".2f",
    "dropped": ".1%",
    "tokens_per_s": ",.0f",
    "samples_per_s": ",.0f",
    "wall_s": ".1f",
}
"""{column of the table on a screen: its format}; the CSV has all columns."""


def write_csv(rows: Sequence[Row], file: TextIO) -> None:
    """Write a header and the rows as CSV.

    The cell of a series that a row lacks is empty; of a value that is not finite it is nan.
    """
    writer = csv.DictWriter(file, ["run", "step", *_names(rows)], lineterminator="\n")
    writer.writerow({name: visible(name) for name in writer.fieldnames})
    for row in rows:
        writer.writerow({name: _exact(value) for name, value in row.items()})


def _names(rows: Iterable[Row]) -> list[str]:
    return [
        name
        for name in dict.fromkeys(n for row in rows for n in row)
        if name not in ("run", "step")
    ]


def _exact(value: Any) -> Any:
    """Return a value for CSV: whole numbers as int, others as the shortest exact text."""
    if isinstance(value, str):
        return visible(value)
    return int(value) if abs(value) < EXACT and value == int(value) else repr(value)


def print_columns(rows: Sequence[Row], file: TextIO) -> None:
    """Print the columns that a person reads and that any of the runs has."""
    if not rows:
        print("no step has been logged yet", file=file)
        return
    names = [name for name in SHOWN if any(name in row for row in rows)]
    if len({row["run"] for row in rows}) > 1:
        names = ["run", *names]
    cells = [[_shown(row, name) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    table = TextTable(
        [
            TextColumn(name, str(width), number, gap=2)
            for number, (name, width) in enumerate(zip(names, widths, strict=True))
        ]
    )
    print(*table.lines(cells), sep="\n", file=file)


def _shown(row: Row, name: str) -> str:
    if name not in row:
        return "-"
    return visible(row[name]) if name == "run" else format(row[name], SHOWN[name])
