"""`mpitrain bench train --shapes`: the table of training steps in many shapes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.cli.bench.options import write_rows
from mpitrain.cli.job_options import Outputs, check_files, configured

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
    from mpitrain.cli.terminal.table_rows import RowPrinter
    from mpitrain.errors import ConfigError, on_every_rank
    from mpitrain.ops.host.product import multiplier
    from mpitrain.tools.bench.collectives.header import header, printed
    from mpitrain.tools.bench.training.shapes import (
        SHAPES,
        chosen,
        heading,
        kind_line,
        line,
        measure_shape,
        settings,
    )
    from mpitrain.tools.bench.training.steps import check_common_steps
    from mpitrain.transport.agreement import on_all_ranks

    def all_configured() -> dict[str, Any]:
        configs = {}
        for name in chosen(names, transport.size):
            own = settings(SHAPES[name], transport.size)
            configs[name] = configured(None, [*job, *own, *changed])
            check_common_steps(configs[name])
        return configs

    wanted = on_all_ranks(transport, all_configured)
    on_all_ranks(transport, lambda: check_files(transport.rank, [json_file]))
    outputs, rows = Outputs(), list[Any]()
    facts = header(transport, "train", "cpu", ["train", "--shapes", names])
    facts["products"] = multiplier()
    shown = RowPrinter(len(wanted), "shapes") if transport.rank == 0 else None
    if shown:
        lines = [*printed(facts), f"# products by {facts['products']}", "", heading()]
        shown.say("\n".join(lines))
    for name, config in wanted.items():
        try:
            measured = measure_shape(transport, name, config, peers, *turns)
        except ConfigError as error:
            if not error.agreed:
                raise
            lines = [f"{name}: not measured. {error.law}"]
        else:
            rows += measured.rows
            lines = [*map(line, measured.rows), kind_line(name, measured.kinds), *measured.notes]
        if shown:
            shown.row("\n".join(lines))
            write_rows(outputs, json_file, None, facts, rows)
    if shown:
        shown.close()
    on_all_ranks(transport, outputs.settle)
    if not rows:
        raise on_every_rank(
            ConfigError("--shapes measures at least one shape, but none was measured.", lines[-1])
        )
