"""Rows of a collective benchmark, printed and written while they are measured."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpitrain.cli.bench.options import write_rows
from mpitrain.cli.output_checks import Outputs


class Printed:
    """An iterator over the rows of a request as they are measured.

    Rank 0 prints each row, and writes all rows so far to the files that are named.
    """

    def __init__(
        self,
        transport: Any,
        request: Any,
        tuning: Any,
        facts: dict[str, Any],
        wide: bool,
        outputs: Outputs,
        json_file: Path | None,
        csv_file: Path | None,
    ):
        """Allocate the buffers and print the heading. Collective.

        outputs  collects the errors of failed writes; the caller calls its `settle`
        """
        from mpitrain.bench.collectives.columns import Table
        from mpitrain.bench.collectives.header import printed
        from mpitrain.bench.collectives.sweep import sweep
        from mpitrain.bench.collectives.table import columns
        from mpitrain.cli.terminal.screen import output_columns
        from mpitrain.cli.terminal.table_rows import Rows

        self._measured, self._files, self._facts = (
            sweep(transport, request, tuning),
            (json_file, csv_file),
            facts,
        )
        self._outputs = outputs
        self._shown = Rows(self._measured.total) if transport.rank == 0 else None
        self._table = Table(
            columns(request.buffers, bool(request.wires)), 0 if wide else output_columns()
        )
        self.say("\n".join([*printed(facts), "", *self._table.heading()]))

    def __iter__(self) -> Iterator[Any]:
        found = []
        try:
            for row in self._measured:
                found.append(row)
                if self._shown:
                    self._shown.row(self._table.line(row))
                    write_rows(self._outputs, *self._files, self._facts, found)
                yield row
        finally:
            if self._shown:
                self._shown.close()

    def say(self, text: str) -> None:
        """Print lines between rows, on rank 0."""
        if self._shown:
            self._shown.say(text)
