"""`mpitrain bench train --shapes`: the table of training steps in many shapes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.cli.bench.options import write_rows
from mpitrain.cli.job_options import configured
from mpitrain.cli.output_checks import Outputs, check_files

PEERS = ("torch", "torch-compiled")
"""The peers of the table, unless the command names some."""


def measure_shapes(
    transport: Any,
    names: str,
    job: Sequence[str],
    changed: Sequence[str],
    peers: Sequence[str],
    turns: tuple[int, int, float],
    json_file: Path | None,
) -> None:
    """Measure and print the shapes one by one; collective.

    job      `section.key=value` of the job that a shape changes
    changed  further settings, for all shapes
    turns    blocks, most steps in a turn, and the bound in seconds of a shape
    """
    from mpitrain.bench.collectives.header import header, printed
    from mpitrain.bench.training.shapes import (
        chosen,
        heading,
        kind_line,
        line,
        measure_shape,
    )
    from mpitrain.cli.terminal.table_rows import Rows
    from mpitrain.errors import ConfigError
    from mpitrain.ops.host.product import multiplier
    from mpitrain.transport.agreement import on_all_ranks

    wanted = on_all_ranks(transport, lambda: chosen(names, transport.size))
    on_all_ranks(transport, lambda: check_files(transport.rank, [json_file]))
    outputs, found = Outputs(), list[Any]()
    facts = header(transport, "train", "cpu", ["train", "--shapes", names])
    facts["products"] = multiplier()
    shown = Rows(len(wanted), "shapes") if transport.rank == 0 else None
    if shown:
        lines = [*printed(facts), f"# products by {facts['products']}", "", heading()]
        shown.say("\n".join(lines))
    for name in wanted:
        try:
            measured = measure_shape(
                transport,
                name,
                lambda settings: configured(None, [*job, *settings, *changed]),
                peers,
                *turns,
            )
        except ConfigError as error:
            if not error.agreed:
                raise
            lines = [f"{name}: not measured. {error.law}"]
        else:
            found += measured.rows
            lines = [*map(line, measured.rows), kind_line(name, measured.kinds), *measured.notes]
        if shown:
            shown.row("\n".join(lines))
            write_rows(outputs, json_file, None, facts, found)
    if shown:
        shown.close()
    on_all_ranks(transport, outputs.settle)
