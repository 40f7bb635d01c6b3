"""`mpitrain bench pairs` and `bench bandwidth`: measure the links between ranks."""

import sys
from typing import Any

import click

from mpitrain.cli.bench.rows import (
    AGAINST,
    FACTOR,
    TABLE,
    BenchReport,
    between_ranks,
    exit_with,
    sized,
    sizes_from,
    table_width,
)
from mpitrain.cli.job_options import counted, output_option
from mpitrain.cli.session import mpi_session

MOST_IN_FLIGHT = 1 << 12


@click.command("pairs")
@sized("--short", "8", "Size of the message for latency.")
@sized("--long", "4M", "Size of the message for bandwidth.")
@counted(
    "--iterations",
    0,
    0,
    "Round trips of each pair and size; 0: as many as fit in 0.1 s, from 3 to 500.",
)
@TABLE
@AGAINST
@output_option("--plot", "Draw both matrices as heat maps to this file.")
def pairs(**options: Any) -> None:
    """Measure latency and bandwidth of every pair of ranks, and name the links that are slow.

    Disjoint pairs are measured at the same time, in the rounds of a round-robin tournament. Pairs
    that look slow are measured again, alone. The classes are pairs within a host and
    pairs between hosts. A link is odd if its bandwidth is below half the usual value of its class.
    It is also odd if its latency is above three times the usual value. Ranks of one host share the host's link, so start one
    rank per host to judge links.
    """
    with mpi_session() as transport:
        wrong = measure_pairs(transport, options)
    exit_with(wrong)


def measure_pairs(transport: Any, options: dict[str, Any]) -> int:
    """Print and write the pairs; return the number of wrong elements and of slow values."""
    from mpitrain.errors import ConfigError
    from mpitrain.tools.bench.pairs import measure, merged, places_to_judge, report, rounds
    from mpitrain.tools.bench.pictures import plot_pairs
    from mpitrain.tools.bench.results import header, printed

    between_ranks(transport, "pairs")
    if min(options["short"], options["long"]) < 1:
        raise ConfigError(
            "A message has at least 1 byte, but --short or --long is 0.", "Set both to 1 or more."
        ).on_every_rank()
    facts = header(transport, "pairs", "cpu", sys.argv[1:])
    shown = BenchReport(transport, facts, options)
    places = places_to_judge(transport.hosts, facts["cores"])
    shown.begin([*printed(facts), ""], len(rounds(transport.size)) + 1, "rounds")
    sizes = options["short"], options["long"]
    for one_round in measure(transport, *sizes, options["iterations"], places=places):
        shown.rows = merged([*shown.rows, *one_round])
        shown.count()
        shown.show()
    slow = shown.end(
        lambda: report(shown.rows, table_width(options), places),
        lambda path: plot_pairs(shown.rows, places, facts, path),
    )
    return sum(pair.wrong for pair in shown.rows) + slow


@click.command("bandwidth")
@click.option(
    "--pairs",
    type=click.Choice(["one", "all"]),
    default="one",
    show_default=True,
    help="One pair, ranks 0 and n/2; or all pairs of ranks k and k + n/2 at the same time.",
)
@counted(
    "--window",
    1,
    64,
    "Messages in flight; fewer where they take more than 64 MiB.",
    most=MOST_IN_FLIGHT,
)
@sizes_from("1", "4M", "message")
@FACTOR
@counted(
    "--iterations",
    0,
    0,
    "Timed windows per row; 0: as many as fit in a quarter of a second, from 5 to 500.",
    short="-n",
)
@TABLE
@AGAINST
def bandwidth(**options: Any) -> None:
    """Measure bandwidth with many messages in flight, one way and both ways, as osu_bw, osu_bibw
    and osu_mbw_mr do.

    Every received message is checked. #wrong counts bytes; the exit code is 1 if there are any.
    """
    with mpi_session() as transport:
        wrong = measure_bandwidth(transport, options)
    exit_with(wrong)


def measure_bandwidth(transport: Any, options: dict[str, Any]) -> int:
    """Print and write the rows; return the number of wrong bytes and of slow values."""
    from mpitrain.tools.bench.bandwidth import COLUMNS, WAYS, BandwidthRequest, footer, measure
    from mpitrain.tools.bench.collectives.sweep import sizes
    from mpitrain.tools.bench.results import header, printed
    from mpitrain.tools.text_table import TextTable
    from mpitrain.transport.agreement import on_all_ranks

    between_ranks(transport, "bandwidth")
    lengths = on_all_ranks(
        transport, lambda: sizes(options["min_bytes"], options["max_bytes"], options["factor"])
    )
    request = BandwidthRequest(
        list(dict.fromkeys(lengths)),
        options["window"],
        options["pairs"] == "all",
        options["iterations"],
    )
    facts = header(transport, "bandwidth", "cpu", sys.argv[1:])
    shown, table = BenchReport(transport, facts, options), TextTable(COLUMNS, table_width(options))
    shown.begin([*printed(facts), "", *table.heading()], len(request.sizes) * len(WAYS))
    rows = [*shown.each(measure(transport, request), table.line)]
    slow = shown.end(lambda: ["", *footer(rows)])
    return sum(row.wrong for row in rows) + slow
