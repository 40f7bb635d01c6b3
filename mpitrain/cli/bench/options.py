"""Options that several sub-commands of `mpitrain bench` share: byte sizes and output files."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpitrain.cli.job_options import Outputs, finite, output_option

if TYPE_CHECKING:
    # This module must not import NumPy before `mpi_session` has limited the BLAS threads.
    from mpitrain.transport.base import Transport

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
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", value.strip(), re.IGNORECASE)
        if not match:
            self.fail(f"{value!r} is no number of bytes; write 4096, 64K, 1.5M or 2G.")
        size = float(match[1]) * UNITS[match[2].upper()]
        if size > MOST_BYTES:
            self.fail(f"{value!r} is more than 1024G.")
        return int(size)


JSON = output_option("--json", "Write the rows to this JSON file as they are measured.")
CSV = output_option("--csv", "Write the rows to this CSV file as they are measured.")
WIDE = click.option(
    "--wide", is_flag=True, help="Print every column, even if the terminal is too narrow."
)


def against_options(command: Callable) -> Callable:
    """Add the options that compare a benchmark with an earlier one to a command."""
    for option in (
        click.option(
            "--tolerance",
            type=click.FloatRange(min=1),
            default=1.25,
            show_default=True,
            callback=finite,
            help="With --against: how many times slower a value may be.",
        ),
        click.option(
            "--against",
            "against_file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Compare with this earlier --json file; exit with code 1 if a value is slower.",
        ),
    ):
        command = option(command)
    return command


class Against:
    """The comparison that `--against` asks for; without the option it prints and counts nothing."""

    def __init__(self, path: Path | None, tolerance: float, facts: dict[str, Any]):
        """Read the earlier file; ConfigError if another benchmark wrote it.

        facts  the header of this benchmark
        """
        from mpitrain.tools.bench.against import read_before

        self._before = read_before(path, facts) if path else None
        self._tolerance, self._facts = tolerance, facts

    def lines(self, rows: Sequence[Any]) -> list[str]:
        from mpitrain.tools.bench.against import ratios, report

        if not self._before:
            return []
        return report(self._before, self._facts, ratios(self._before, rows), self._tolerance)

    def failures(self, rows: Sequence[Any]) -> int:
        """Return the number of slow values; 1 if no row is in both benchmarks."""
        from mpitrain.tools.bench.against import ratios, slow

        if not self._before:
            return 0
        compared = ratios(self._before, rows)
        return len(slow(compared, self._tolerance)) if compared else 1


def compared(transport: "Transport", options: dict[str, Any], facts: dict[str, Any]) -> "Against":
    """Return the comparison of a benchmark on several ranks; only rank 0 reads the file.

    Collective. Other ranks compare nothing, and rank 0's exit code counts.
    """
    from mpitrain.transport.agreement import on_all_ranks

    path = options["against_file"] if transport.rank == 0 else None
    return on_all_ranks(transport, lambda: Against(path, options["tolerance"], facts))


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
    from mpitrain.tools.bench.collectives.table import write_csv, write_json

    if json_file:
        with outputs.to(json_file):
            write_json(json_file, facts, rows)
    if csv_file:
        with outputs.to(csv_file):
            write_csv(csv_file, rows)
