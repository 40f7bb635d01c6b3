"""`mpitrain bench fit`: fits the constants of the cost model to measurements on this machine."""

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.bench.options import Bytes, table_options
from mpitrain.cli.bench.rows import printed_sweep
from mpitrain.cli.job_options import Outputs, check_files
from mpitrain.cli.session import MOST, mpi_session


@click.command("fit")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("tuning.json"),
    show_default=True,
    help="Tuning file to write.",
)
@click.option("--min-bytes", type=Bytes(), default="64", show_default=True, help="Smallest array.")
@click.option("--max-bytes", type=Bytes(), default="64M", show_default=True, help="Largest array.")
@click.option(
    "--sweeps",
    type=click.IntRange(1, MOST),
    default=3,
    show_default=True,
    help="Repetitions of the whole measurement.",
)
@table_options
def fit(out: Path, min_bytes: int, max_bytes: int, sweeps: int, **printing: Any) -> None:
    """Measure every all-reduce and fit the cost model to it, for this number of ranks.

    A second fit, without every second size, shows how well the model predicts sizes that it has not
    seen. Over slow links, sizes end once the time grows in proportion, except for one that is as
    long as the largest bucket of a run. The file is written after every sweep, so an interruption
    loses only the last one. Run it once for every number of ranks that you use. Constants for other
    numbers of ranks on the same machine stay in the file.
    """
    with mpi_session() as transport:
        _fit(transport, out, min_bytes, max_bytes, sweeps, printing)


def _fit(
    transport: Any, out: Path, min_bytes: int, max_bytes: int, sweeps: int, printing: dict[str, Any]
) -> None:
    """Write the fit after every sweep; at the end check the model on sizes left out.

    printing  the options of `table_options`
    """
    import numpy as np

    from mpitrain.collectives.selection.algorithm import Topology
    from mpitrain.collectives.selection.cost_model import MEMORY, candidates
    from mpitrain.collectives.selection.tuning import DEFAULT, read_tuning, write_tuning
    from mpitrain.errors import ConfigError, MpitrainError, on_every_rank
    from mpitrain.tools.bench.collectives.fit import (
        all_spoilt,
        checked,
        decided,
        described,
        fit,
        median_of_sweeps,
        merged,
    )
    from mpitrain.tools.bench.collectives.header import header, machine
    from mpitrain.tools.bench.collectives.request import SweepRequest, sizes
    from mpitrain.tools.bench.collectives.row import CollectiveRow
    from mpitrain.transport.agreement import on_all_ranks

    if transport.size == 1:
        raise on_every_rank(
            ConfigError(
                "bench fit measures messages, and one rank sends none.",
                "mpitrain launch -n 2 -- bench fit",
            )
        )
    before = on_all_ranks(transport, lambda: read_tuning(out) if out.exists() else None)
    on_all_ranks(
        transport,
        lambda: check_files(transport.rank, [out, printing["json_file"], printing["csv_file"]]),
    )
    # Windows serve the algorithm `shared`, which needs a single host.
    places = MEMORY if len(set(transport.hosts)) == 1 else ("plain",)
    request = SweepRequest(
        "allreduce",
        candidates(Topology(transport.hosts)),
        sizes(min_bytes, max_bytes, 2),
        np.dtype("float32"),
        0,
        3,
        places,
        sweeps,
        stops=True,
    )
    identity, tuning = machine(transport), DEFAULT
    rows, outputs = list[CollectiveRow](), Outputs()
    facts = header(transport, request.operation, request.device, sys.argv[1:])
    measured = printed_sweep(transport, request, DEFAULT, facts, outputs=outputs, **printing)
    for number, swept in groupby(measured, key=lambda row: row.sweep):
        rows += swept
        if spoilt := all_spoilt(rows):
            measured.say(
                f"sweep {number} of {sweeps}: nothing is written, as every row of {' and '.join(spoilt)} arrays is marked ~"
            )
        elif transport.rank == 0:
            tuning = fit(identity, transport.hosts, median_of_sweeps(rows))
            with outputs.to(out):
                write_tuning(out, merged(before, tuning))
                measured.say(f"sweep {number} of {sweeps}: written to {out}")
    if all_spoilt(rows):
        raise on_every_rank(
            MpitrainError(
                "bench fit learns from rows that other work did not spoil, but there are none.",
                "Measure again while nothing else runs, or with more --sweeps.",
            )
        )
    if transport.rank == 0:
        click.echo(
            "\n"
            + "\n".join(
                [
                    *described(tuning, transport.size),
                    *decided(tuning, transport.hosts, rows),
                    *checked(identity, transport.hosts, rows),
                ]
            )
        )
        if before and before.machine != identity:
            click.echo(f"{out} held constants of another machine; these have taken their place")
    on_all_ranks(transport, outputs.settle)
