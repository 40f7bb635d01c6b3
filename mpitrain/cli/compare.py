"""`mpitrain compare`: trains one job under several modes of replication, and tabulates them."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.job_options import DEVICE, changes, configured
from mpitrain.cli.output_checks import Outputs, check_files, output_option
from mpitrain.cli.session import MOST, mpi_session

EVALUATED = 512
"""Rows of the evaluation: evaluating all of them would take longer than the steps."""


@click.command()
@click.option(
    "--modes",
    metavar="A,B",
    help="Modes to compare: all-reduce algorithms such as star, ring or auto; zero1, zero2, zero3, "
    "also as zero1-host ..., sharded within each host; other modes of replication. Default: star, "
    "ring, auto, and every mode that is neither an all-reduce algorithm nor ends in -host.",
)
@click.option(
    "--steps",
    type=click.IntRange(2, MOST),
    default=30,
    show_default=True,
    help="Optimizer steps of each mode.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Set one configuration key for all modes (repeatable).",
)
@DEVICE
@output_option("--json", "Write the rows to this JSON file as they are measured.")
@output_option("--plot", "Draw loss over time to this file, at the end.")
def command(
    modes: str | None,
    steps: int,
    settings: tuple[str, ...],
    device: str | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Train one job under several modes of replication, one after the other, on all ranks of the
    MPI job.

    All modes have the same model, seed, order of the data and global batch. The columns are:

    \b
    step ms     time of a step
    exposed ms  time in a step that a worker waits for messages
    sent bytes  bytes that the busiest rank sends in a step, also by formula;
                without shared memory and the MPI library's own reductions
    held MB     parameters, gradients, optimizer state and reduction buffers
                on the fullest rank, without activations
    stale       largest staleness of a gradient, in updates
    """
    changed = [
        f"run.steps={steps}",
        f"run.eval_rows={EVALUATED}",
        *changes(settings, device=device),
    ]
    with mpi_session(kind=lambda: configured(None, changed).device.kind) as transport:
        _compare(transport, modes, changed, json_file, plot_file)


def _compare(
    transport: Any,
    modes: str | None,
    changes: list[str],
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    from tqdm import tqdm

    from mpitrain import __version__
    from mpitrain.bench.collectives.header import machine
    from mpitrain.bench.collectives.table import write_json
    from mpitrain.bench.training.compare import compare, footer, heading, jobs, line, plot, usual
    from mpitrain.cli.terminal.progress import bar
    from mpitrain.transport.agreement import on_all_ranks

    words = list(dict.fromkeys(modes.split(","))) if modes else usual()
    found = on_all_ranks(transport, lambda: jobs(words, changes, transport.hosts))
    is_root = transport.rank == 0
    on_all_ranks(transport, lambda: check_files(transport.rank, [json_file], plot_file))
    job = next(iter(found.values()))
    steps = job.run.steps
    facts = {
        "mpitrain": __version__,
        "ranks": transport.size,
        **machine(transport),
        "steps": steps,
        "arguments": sys.argv[1:],
    }
    title = (
        f"{job.model.kind}, {job.model.layers} layers of width {job.model.width} on {job.data.source}: {steps} steps "
        f"of {job.batch.size} rows by {transport.size} ranks on {facts['hosts']} host(s), {job.precision.compute}"
    )
    if is_root:
        click.echo(
            f"{title}\n{facts['processor']}, {facts['cores']} cores; {facts['mpi']}\n\n{heading()}"
        )
    rows, outputs = [], Outputs()
    with closing(bar(len(found) * steps) if is_root else tqdm(disable=True)) as shown:

        def stepped(mode: str, loss: float) -> None:
            shown.set_postfix_str(f"{mode}, loss {loss:.3f}", refresh=False)
            shown.update()

        for row in compare(transport, found, stepped):
            rows.append(row)
            if is_root:
                shown.write(line(row), file=sys.stdout)
                if json_file:
                    with outputs.to(json_file):
                        write_json(json_file, facts, rows)
    outputs.conclude(
        transport, lambda: ["", *footer(rows)], plot_file, lambda path: plot(rows, title, path)
    )
