"""Options that several sub-commands of `mpitrain bench` share: byte sizes and output files."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.output_checks import Outputs, output_option

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MOST_BYTES = 1 << 40


class Bytes(click.ParamType):
    """A Click type for a number of bytes: 4096, 64K, 1.5M, 2G; at most a tebibyte."""

    name = "bytes"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", value.strip(), re.IGNORECASE)
        if not found:
            self.fail(f"{value!r} is no number of bytes; write 4096, 64K, 1.5M or 2G.")
        size = float(found[1]) * UNITS[found[2].upper()]
        if size > MOST_BYTES:
            self.fail(f"{value!r} is more than 1024G.")
        return int(size)


JSON = output_option("--json", "Write the rows to this JSON file as they are measured.")
CSV = output_option("--csv", "Write the rows to this CSV file as they are measured.")
WIDE = click.option(
    "--wide", is_flag=True, help="Print every column, even if the terminal is too narrow."
)


def table_options(command: Callable) -> Callable:
    """Add the options of a table that is printed as it is measured to a command."""
    for option in (WIDE, CSV, JSON):
        command = option(command)
    return command


def write_rows(
    outputs: Outputs,
    json_file: Path | None,
    csv_file: Path | None,
    facts: dict[str, Any],
    rows: list[Any],
) -> None:
    """Write the rows so far to the files that the options name."""
    from mpitrain.bench.collectives.table import write_csv, write_json

    if json_file:
        with outputs.to(json_file):
            write_json(json_file, facts, rows)
    if csv_file:
        with outputs.to(csv_file):
            write_csv(csv_file, rows)
