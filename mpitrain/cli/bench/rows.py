"""What commands of `bench` share: options, printing and writing of rows, and --against."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpitrain.cli.job_options import (
    Outputs,
    check_files,
    in_words,
    measured,
    output_option,
    path_option,
    say,
    with_options,
)

if TYPE_CHECKING:
    # This module must not import NumPy before `mpi_session` has limited the BLAS threads.
    from mpitrain.transport.base import Transport

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MOST_BYTES = 1 << 40


class Bytes(click.ParamType):
    """A Click type: a number of bytes such as 4096, 64K, 1.5M or 2G; at most a tebibyte."""

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


def sized(name: str, default: str, text: str, short: str = "") -> Callable[[Callable], Callable]:
    """Return a Click option for a number of bytes."""
    names = (short, name) if short else (name,)
    return click.option(*names, type=Bytes(), default=default, show_default=True, help=text)


def _set_sizes(context: click.Context, option: click.Parameter, text: str | None) -> None:
    if text:
        least, colon, most = text.rpartition(":")
        sizes = {"min_bytes": least, "max_bytes": most} if colon else {"max_bytes": most}
        context.default_map = {**(context.default_map or {}), **sizes}


def sizes_from(least: str, most: str, noun: str) -> Callable[[Callable], Callable]:
    """Return the options of the sizes of a benchmark, also in the spelling of nccl-tests and OSU."""
    return with_options(
        sized("--min-bytes", least, f"Smallest {noun}.", "-b"),
        sized("--max-bytes", most, f"Largest {noun}.", "-e"),
        click.option(
            "-m",
            "--message-size",
            metavar="[MIN:]MAX",
            callback=_set_sizes,
            is_eager=True,  # before the sizes, whose defaults it sets
            expose_value=False,
            help="Both at once, as for osu_allreduce.",
        ),
    )


JSON = output_option("--json", "Write the rows to this JSON file as they are measured.")
CSV = output_option("--csv", "Write the rows to this CSV file as they are measured.")
FACTOR = click.option(
    "-f", "--factor", type=float, default=4, show_default=True, help="Ratio of successive sizes."
)
TABLE = with_options(
    JSON,
    CSV,
    click.option(
        "--wide", is_flag=True, help="Print every column, even if the terminal is too narrow."
    ),
)
"""The options of a table that is printed as it is measured."""
AGAINST = with_options(
    path_option(
        "--against",
        "Compare with this earlier --json file; exit with code 1 if a value is slower.",
        "against_file",
        metavar="FILE",
    ),
    measured("--tolerance", 1, 1.25, "With --against: how many times slower a value may be."),
)
"""The options that compare a benchmark with an earlier one."""


def between_ranks(transport: "Transport", command: str) -> None:
    """Raise ConfigError on every rank if there is only one rank, and so no link to measure."""
    from mpitrain.errors import ConfigError

    if transport.size == 1:
        raise ConfigError(
            f"bench {command} measures messages between two ranks, but there is one.",
            f"mpitrain launch -n 2 -- bench {command}",
        ).on_every_rank()


class BenchReport:
    """What a benchmark prints and writes on rank 0, during the measurement and at its end.

    facts  the header of the JSON file
    rows   the rows measured so far, on every rank
    """

    def __init__(
        self, transport: "Transport | None", facts: dict[str, Any], options: Mapping[str, Any]
    ):
        """Check the files that the options name, and read the one of --against. Collective.

        transport  None for a benchmark without MPI
        """
        from mpitrain.tools.bench.against import read_before

        self.facts, self.rows, self.outputs = facts, list[Any](), Outputs()
        self._transport, self.is_root = transport, transport is None or transport.rank == 0
        self._json, self._csv = options.get("json_file"), options.get("csv_file")
        self._plot, self._tolerance = options.get("plot_file"), options.get("tolerance", 1.0)
        self._bar: Any = None
        rank, against = int(not self.is_root), options.get("against_file")
        self._everywhere(lambda: check_files(rank, [self._json, self._csv], self._plot))
        self._before = self._everywhere(
            lambda: read_before(against, facts) if against and self.is_root else None
        )

    def _everywhere(self, call: Callable[[], Any]) -> Any:
        """Call a function; if there are several ranks, its error is raised on all of them."""
        if self._transport is None:
            return call()
        from mpitrain.transport.agreement import on_all_ranks

        return on_all_ranks(self._transport, call)

    def begin(self, lines: Sequence[str], total: int = 0, unit: str = "rows") -> None:
        """Print the heading; on a terminal, start a progress bar of at most `total` rows."""
        if self.is_root and total:
            from mpitrain.cli.terminal.progress import ROWS, bar

            self._bar = bar(total, form=ROWS.format(unit=unit))
            self._bar.leave = False
        self.say("\n".join(lines))

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.say(in_words([text]))
        elif self.is_root:
            say([text])

    def each(self, rows: Iterable[Any], line: Callable[[Any], str]) -> Iterator[Any]:
        """Yield rows as they are measured. After each, print its line, and write all rows so far."""
        for row in rows:
            self.rows.append(row)
            self.count()
            self.show(line(row))
            yield row

    def count(self, note: str = "") -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()

    def show(self, text: str = "") -> None:
        if text:
            self.say(text)
        if not self.is_root:
            return
        from mpitrain.tools.bench.results import write_csv, write_json

        if self._json:
            with self.outputs.to(self._json):
                write_json(self._json, self.facts, self.rows)
        if self._csv:
            with self.outputs.to(self._csv):
                write_csv(self._csv, self.rows)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def end(
        self,
        lines: Callable[[], list[str]] = list,
        draw: Callable[[Path], None] = lambda path: None,
    ) -> int:
        """Print the last lines and the comparison with an earlier benchmark; draw the picture. Collective.

        Returns the number of slow values; 1 if the two benchmarks have no row in common.

        raises  ConfigError on every rank if a file could not be written
        """
        from mpitrain.tools.bench.against import ratios, report, slow

        self.close()
        compared, before = [], self._before
        if before:
            compared = ratios(before, self.rows)
        if self.is_root:
            last = lines()
            last += report(before, self.facts, compared, self._tolerance) if before else []
            if last:
                say(last)
            if self._plot:
                with self.outputs.to(self._plot):
                    draw(self._plot)
        self._everywhere(self.outputs.settle)
        if not before:
            return 0
        return len(slow(compared, self._tolerance)) if compared else 1


def table_width(options: dict[str, Any]) -> int:
    """Return the number of characters that a line of a table may have; 0: no limit."""
    from mpitrain.cli.terminal.output import output_columns

    return 0 if options["wide"] else output_columns()


def exit_with(wrong: int) -> None:
    """Exit with 1 if anything is wrong. That is a result, so `launch` hides what mpirun says of it."""
    from mpitrain.machine.status import status

    sys.stdout.write(status("ended"))
    sys.stdout.flush()
    sys.exit(1 if wrong else 0)
