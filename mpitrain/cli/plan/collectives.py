"""`mpitrain plan allreduce`, `reduce-scatter` and `all-gather`: print a collective step by step."""

from collections.abc import Callable
from pathlib import Path

import click

from mpitrain.cli.bench.rows import Bytes
from mpitrain.cli.job_options import Outputs, check_files, output_option
from mpitrain.cli.plan.chart_width import columns
from mpitrain.machine import process

OPTIONS = (
    click.option(
        "--algorithm", default="ring", show_default=True, help="Any algorithm that sends messages."
    ),
    click.option(
        "--ranks",
        type=click.IntRange(1, 256),
        default=4,
        show_default=True,
        help="Ranks of the collective.",
    ),
    click.option(
        "--hosts",
        type=click.IntRange(1, 256),
        default=1,
        show_default=True,
        help="Hosts; consecutive ranks share a host.",
    ),
    click.option(
        "--bytes",
        "nbytes",
        type=Bytes(),
        help="Also print the bytes that each rank sends, for a float32 array of this size.",
    ),
    output_option("--json", "Write all steps and buffer contents to this file."),
    output_option("--plot", "Draw the steps to this file. Needs mpitrain[report]."),
)


def options(function: Callable) -> Callable:
    for option in reversed(OPTIONS):
        function = option(function)
    return function


@click.command("allreduce")
@options
def allreduce(**chosen: object) -> None:
    """Print an all-reduce step by step.

    Below the messages of a step, the contents of every rank are shown: the ranks that contributed
    to its data. A line marks the border between the reduce-scatter and all-gather halves. Totals
    follow, counted and by formula. `reduce-scatter` and `all-gather` print the halves as separate
    collectives.
    """
    _plan("allreduce", **chosen)  # type: ignore[arg-type]


@click.command("reduce-scatter")
@options
def reduce_scatter(**chosen: object) -> None:
    """Print a reduce-scatter step by step: at the end rank r holds the sum of chunk r."""
    _plan("reduce-scatter", **chosen)  # type: ignore[arg-type]


@click.command("all-gather")
@options
def all_gather(**chosen: object) -> None:
    """Print an all-gather step by step: rank r contributes chunk r; all ranks get all chunks."""
    _plan("all-gather", **chosen)  # type: ignore[arg-type]


def _plan(
    operation: str,
    algorithm: str,
    ranks: int,
    hosts: int,
    nbytes: int | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    if process.launched().rank > 0:
        return  # only rank 0 prints
    from mpitrain.collectives.selection.algorithm import is_file
    from mpitrain.collectives.selection.own_algorithm import file_algorithm
    from mpitrain.errors import ConfigError
    from mpitrain.tools.plan.collective import collective
    from mpitrain.tools.plan.collective_text import printed
    from mpitrain.tools.plan.traffic import amounts

    if hosts > ranks:
        raise ConfigError(
            f"Every host has a rank, but there are {ranks} ranks on {hosts} hosts.",
            f"Take at most {ranks} hosts.",
        )
    if operation == "allreduce" and is_file(algorithm):
        algorithm = file_algorithm(algorithm)
    names = [f"host {rank * hosts // ranks}" for rank in range(ranks)]
    simulated = collective(operation, algorithm, names)
    check_files(0, [json_file], plot_file)
    click.echo("\n".join(printed(simulated, columns())))
    if nbytes is not None:
        click.echo("\n" + "\n".join(amounts(operation, algorithm, names, nbytes)))
    outputs = Outputs()
    if json_file:
        from mpitrain.files import write_whole
        from mpitrain.tools.plan.collective_json import written

        with outputs.to(json_file):
            write_whole(json_file, written(simulated))
            click.echo(f"written to {json_file}")
    if plot_file:
        from mpitrain.tools.plan.collective_picture import draw

        with outputs.to(plot_file):
            draw(simulated, plot_file)
            click.echo(f"drawn in {plot_file}")
    outputs.settle()
