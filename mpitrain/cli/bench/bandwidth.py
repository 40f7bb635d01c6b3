"""`mpitrain bench bandwidth`: measures links with many messages in flight."""

import sys
from typing import Any

import click

from mpitrain.cli.bench.options import Bytes, against_options, compared, table_options
from mpitrain.cli.bench.rows import Printed, between_ranks
from mpitrain.cli.job_options import Outputs, check_files, output_option
from mpitrain.cli.session import MOST, mpi_session

MOST_IN_FLIGHT = 1 << 12


@click.command("bandwidth")
@click.option(
    "--pairs",
    type=click.Choice(["one", "all"]),
    default="one",
    show_default=True,
    help="One pair, ranks 0 and n/2; or all pairs of ranks k and k + n/2 at the same time.",
)
@click.option(
    "--ways",
    type=click.Choice(["one", "both", "one,both"]),
    default="one,both",
    show_default=True,
    help="Directions of messages: one as in osu_bw, both as in osu_bibw.",
)
@click.option(
    "--window",
    type=click.IntRange(1, MOST_IN_FLIGHT),
    default=64,
    show_default=True,
    help="Messages in flight; fewer where they take more than 64 MiB.",
)
@click.option("--min-bytes", type=Bytes(), default="1", show_default=True, help="Shortest message.")
@click.option("--max-bytes", type=Bytes(), default="4M", show_default=True, help="Longest message.")
@click.option(
    "--factor", type=float, default=4, show_default=True, help="Ratio of successive sizes."
)
@click.option(
    "--iterations",
    type=click.IntRange(0, MOST),
    default=0,
    show_default=True,
    help="Timed windows per row; 0: as many as fit in a quarter of a second, from 5 to 500.",
)
@table_options
@against_options
@output_option("--plot", "Draw bandwidth and messages per second to this file.")
def command(**options: Any) -> None:
    """Measure bandwidth with many messages in flight, one way and both ways, as osu_bw, osu_bibw
    and osu_mbw_mr do.

    Every received message is checked. #wrong counts bytes; the exit code is 1 if there are any.
    """
    with mpi_session() as transport:
        wrong = _measure(transport, options)
    sys.exit(1 if wrong else 0)


def _measure(transport: Any, options: dict[str, Any]) -> int:
    """Return the number of wrong bytes and slow values."""
    from mpitrain.cli.terminal.screen import output_columns
    from mpitrain.tools.bench.collectives.header import header
    from mpitrain.tools.bench.collectives.request import sizes
    from mpitrain.tools.bench.links.bandwidth import COLUMNS, BandwidthRequest, footer, measure
    from mpitrain.tools.bench.links.pictures import plot_bandwidth
    from mpitrain.tools.text_table import TextTable
    from mpitrain.transport.agreement import on_all_ranks

    between_ranks(transport, "bandwidth")
    lengths = on_all_ranks(
        transport, lambda: sizes(options["min_bytes"], options["max_bytes"], options["factor"])
    )
    files = options["json_file"], options["csv_file"]
    on_all_ranks(transport, lambda: check_files(transport.rank, files, options["plot_file"]))
    facts = header(transport, "bandwidth", "cpu", sys.argv[1:])
    against = compared(transport, options, facts)
    request = BandwidthRequest(
        list(dict.fromkeys(lengths)),
        options["window"],
        options["ways"].split(","),
        options["pairs"] == "all",
        options["iterations"],
    )
    measured, total = measure(transport, request), len(request.sizes) * len(request.ways)
    table, outputs = TextTable(COLUMNS, 0 if options["wide"] else output_columns()), Outputs()
    rows = list(Printed(transport, measured, total, table, facts, outputs, *files))
    outputs.conclude(
        transport,
        lambda: ["", *footer(rows), *against.lines(rows)],
        options["plot_file"],
        lambda path: plot_bandwidth(rows, facts, path),
    )
    return sum(row.wrong for row in rows) + against.failures(rows)
