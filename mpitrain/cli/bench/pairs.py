"""`mpitrain bench pairs`: measures the link between every two ranks."""

import sys
from typing import Any

import click

from mpitrain.cli.bench.options import Bytes, against_options, compared, table_options, write_rows
from mpitrain.cli.bench.rows import between_ranks
from mpitrain.cli.job_options import Outputs, check_files, output_option
from mpitrain.cli.session import MOST, mpi_session


@click.command("pairs")
@click.option(
    "--short",
    type=Bytes(),
    default="8",
    show_default=True,
    help="Size of the message for latency.",
)
@click.option(
    "--long",
    type=Bytes(),
    default="4M",
    show_default=True,
    help="Size of the message for bandwidth.",
)
@click.option(
    "--iterations",
    type=click.IntRange(0, MOST),
    default=0,
    show_default=True,
    help="Round trips of each pair and size; 0: as many as fit in 0.1 s, from 3 to 500.",
)
@table_options
@against_options
@output_option("--plot", "Draw both matrices as heat maps to this file.")
def command(**options: Any) -> None:
    """Measure latency and bandwidth of every pair of ranks, and name the links that are slow.

    Disjoint pairs are measured at the same time, in the rounds of a round-robin tournament. Pairs
    that look slow are measured again, alone. The classes are pairs within a host and
    pairs between hosts. A link is odd if its bandwidth is below half the usual value of its class.
    It is also odd if its latency is above three times the usual value. Ranks of one host share the host's link, so start one
    rank per host to judge links.
    """
    with mpi_session() as transport:
        wrong = _measure(transport, options)
    sys.exit(1 if wrong else 0)


def _measure(transport: Any, options: dict[str, Any]) -> int:
    """Return the number of wrong elements and slow values."""
    from mpitrain.cli.terminal.screen import output_columns
    from mpitrain.cli.terminal.table_rows import RowPrinter
    from mpitrain.errors import ConfigError, on_every_rank
    from mpitrain.tools.bench.collectives.header import header, printed
    from mpitrain.tools.bench.links.pairs import measure, merged, places_to_judge, rounds
    from mpitrain.tools.bench.links.pairs_table import report
    from mpitrain.tools.bench.links.pictures import plot_pairs
    from mpitrain.transport.agreement import on_all_ranks

    between_ranks(transport, "pairs")
    if min(options["short"], options["long"]) < 1:
        raise on_every_rank(
            ConfigError(
                "A message has at least 1 byte, but --short or --long is 0.",
                "Set both to 1 or more.",
            )
        )
    files = options["json_file"], options["csv_file"]
    on_all_ranks(transport, lambda: check_files(transport.rank, files, options["plot_file"]))
    facts = header(transport, "pairs", "cpu", sys.argv[1:])
    against = compared(transport, options, facts)
    places = places_to_judge(transport.hosts, facts["cores"])
    measured = measure(
        transport, options["short"], options["long"], options["iterations"], places=places
    )
    outputs, pairs = Outputs(), list[Any]()
    if transport.rank == 0:
        shown = RowPrinter(len(rounds(transport.size)) + 1, "rounds")
        shown.say("\n".join([*printed(facts), ""]))
        for one_round in measured:
            pairs = merged([*pairs, *one_round])
            write_rows(outputs, *files, facts, pairs)
            shown.count()
        shown.close()
    else:
        pairs = [pair for one_round in measured for pair in one_round]
    outputs.conclude(
        transport,
        lambda: [
            *report(pairs, 0 if options["wide"] else output_columns(), places),
            *against.lines(pairs),
        ],
        options["plot_file"],
        lambda path: plot_pairs(pairs, places, facts, path),
    )
    return sum(pair.wrong for pair in pairs) + against.failures(pairs)
