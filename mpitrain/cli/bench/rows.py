"""Rows of a benchmark, printed and written while they are measured."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.cli.bench.options import write_rows
from mpitrain.cli.job_options import Outputs

if TYPE_CHECKING:
    # This module must not import NumPy before `mpi_session` has limited the BLAS threads.
    from mpitrain.tools.text_table import TextTable
    from mpitrain.transport.base import Transport


def between_ranks(transport: "Transport", command: str) -> None:
    """Raise ConfigError on every rank if there is one: no link can be measured."""
    from mpitrain.errors import ConfigError, on_every_rank

    if transport.size == 1:
        raise on_every_rank(
            ConfigError(
                f"bench {command} measures messages between two ranks, but there is one.",
                f"mpitrain launch -n 2 -- bench {command}",
            )
        )


class Printed:
    """An iterator over rows as they are measured.

    Rank 0 prints each row, and writes all rows so far to the files that are named.
    """

    def __init__(
        self,
        transport: "Transport",
        measured: Iterable[Any],
        total: int,
        table: "TextTable",
        facts: dict[str, Any],
        outputs: Outputs,
        json_file: Path | None,
        csv_file: Path | None,
    ):
        """Print the heading.

        total    upper bound of the number of rows
        facts    the header of the table and of the JSON file
        outputs  collects the errors of failed writes; the caller calls its `settle`
        """
        from mpitrain.cli.terminal.table_rows import RowPrinter
        from mpitrain.tools.bench.collectives.header import printed

        self._measured, self._table, self._facts = measured, table, facts
        self._outputs, self._files = outputs, (json_file, csv_file)
        self._shown = RowPrinter(total) if transport.rank == 0 else None
        self.say("\n".join([*printed(facts), "", *table.heading()]))

    def __iter__(self) -> Iterator[Any]:
        rows = []
        try:
            for row in self._measured:
                rows.append(row)
                if self._shown:
                    self._shown.row(self._table.line(row))
                    write_rows(self._outputs, *self._files, self._facts, rows)
                yield row
        finally:
            if self._shown:
                self._shown.close()

    def say(self, text: str) -> None:
        """Print lines between rows, on rank 0."""
        if self._shown:
            self._shown.say(text)


def printed_sweep(
    transport: "Transport",
    request: Any,
    tuning: Any,
    facts: dict[str, Any],
    wide: bool,
    outputs: Outputs,
    **files: Path | None,
) -> Printed:
    """Return the rows of a `SweepRequest`, after allocating its buffers. Collective.

    wide   print every column
    files  `json_file` and `csv_file`
    """
    from mpitrain.cli.terminal.screen import output_columns
    from mpitrain.tools.bench.collectives.sweep import sweep
    from mpitrain.tools.bench.collectives.table import columns
    from mpitrain.tools.text_table import TextTable

    measured = sweep(transport, request, tuning)
    table = TextTable(
        columns(request.buffers, bool(request.wires)), 0 if wide else output_columns()
    )
    return Printed(transport, measured, measured.total, table, facts, outputs, **files)
