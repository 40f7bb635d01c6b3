"""`mpitrain compare`: one training job under several modes of replication, side by side."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.output_checks import Outputs, check_files
from mpitrain.cli.session import MOST, mpi_session, settings_of

EVALUATED = 512  # rows: an evaluation of all would take longer than the steps


@click.command()
@click.option(
    "--modes",
    metavar="A,B",
    help="What to compare: all-reduces such as star, ring or auto; zero1, zero2, zero3, "
    "and zero1-host ..., divided within each host; other modes. Default: star, ring, "
    "auto and every mode that is no all-reduce, but for those that end in -host.",
)
@click.option(
    "--steps",
    type=click.IntRange(2, MOST),
    default=30,
    show_default=True,
    help="Optimizer steps of each.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Change the job, for all modes (repeatable).",
)
@click.option("--device", metavar="KIND", help="Where to compute: auto, cpu, cuda, cuda-sim.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    help="Write rows there, as they are measured.",
)
@click.option(
    "--plot", "plot_file", type=click.Path(path_type=Path), help="Draw loss over time, at the end."
)
def command(
    modes: str | None,
    steps: int,
    settings: tuple[str, ...],
    device: str | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Train one job under several modes of replication, one after the other, on all the ranks this was started with.

    Model, seed, order of the data and global batch are the same. The table has a step's time, how much of it a worker stood
    still for messages, and the bytes that the busiest rank sent in it, beside the formula; what moves in shared memory or in
    the MPI library's own reductions is not counted. `held` are parameters, gradients, optimizer state and what reductions
    allocate besides, on the rank that holds most; activations are not.
    """
    changes = [
        f"run.steps={steps}",
        f"run.eval_rows={EVALUATED}",
        *settings,
        *settings_of(("device.kind", device)),
    ]
    with mpi_session(kind=lambda: _kind(changes)) as transport:
        _compare(transport, modes, changes, json_file, plot_file)


def _kind(changes: list[str]) -> Any:
    from mpitrain.config import parse, with_settings

    return parse(with_settings({}, changes)).device.kind


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
    from mpitrain.bench.training.compare import USUAL, compare, footer, heading, jobs, line, plot
    from mpitrain.cli.terminal.progress import bar
    from mpitrain.transport.agreement import on_all_ranks

    words = list(dict.fromkeys(modes.split(","))) if modes else USUAL
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
    if is_root:
        click.echo("\n" + "\n".join(footer(rows)))
        if plot_file:
            with outputs.to(plot_file):
                plot(rows, title, plot_file)
    on_all_ranks(transport, outputs.settle)
