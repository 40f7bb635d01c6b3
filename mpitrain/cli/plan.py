"""`mpitrain plan`: what would happen, without doing it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import click

from mpitrain.cli import Group
from mpitrain.cli.bench_options import Bytes
from mpitrain.cli.files import check_files
from mpitrain.cli.micro_batches import command as micro_batches
from mpitrain.machine import process
from mpitrain.pipeline.schedules import NAMED, STREAMS

NARROWEST, WIDEST, PIPED = 80, 130, 100
"""Columns of a chart: those of the terminal within bounds, and where there is none."""


LEAST, MOST = 1e-12, 1e12
"""Milliseconds and megabytes, but for 0: sums and ratios of such amounts are numbers."""

HALVES, KEPT = ("forward", "backward", "weight"), ("saved", "pending")


def columns() -> int:
    return min(max(shutil.get_terminal_size((PIPED, 24)).columns, NARROWEST), WIDEST)


@click.group(cls=Group)
def command() -> None:
    """Print what would happen: the order of a pipeline, the steps of an all-reduce.

    `micro-batches` measures on all ranks of a job; the others need no MPI and one process.
    """


command.add_command(micro_batches)


def amount(name: str, default: float, text: str) -> Callable:
    """An option that takes milliseconds or megabytes."""
    return click.option(name, type=click.FloatRange(0), default=default, show_default=True, metavar="NUMBER", help=text)


@command.command("schedule")
@click.option("--schedule", "name", default="1f1b", show_default=True, metavar="NAME|FILE",
              help=f"{', '.join(NAMED)}, or a file.")
@click.option("--stages", type=click.IntRange(1, 128), show_default="4", help="Ranks of the pipeline.")
@click.option("--micro-batches", type=click.IntRange(1, 512), show_default="8", help="Parts of a batch.")
@click.option("--chunks", type=click.IntRange(1, 26), show_default="2",
              help="Parts of the model per stage, of interleaved and breadth-first.")
@amount("--forward-ms", 1, "A micro-batch's forward in a stage, all its parts together.")
@amount("--backward-ms", 1, "Likewise the half of backward that makes the input's gradient.")
@amount("--weight-ms", 1, "Likewise the half that makes the weights' gradients.")
@amount("--transfer-ms", 0, "A message's way, beside what stages compute meanwhile.")
@amount("--receive-ms", 0, "What a message takes of the stage that waits for it.")
@amount("--saved-mb", 0, "What a stage's forward keeps of a micro-batch for its input half.")
@amount("--pending-mb", 0, "What the input half keeps for the weight half.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the order there, as --schedule reads it.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw the chart there. Needs mpitrain[report].")
def schedule(name: str, stages: int | None, micro_batches: int | None, chunks: int | None, json_file: Path | None,
             plot_file: Path | None, **amounts: float) -> None:
    """Simulate a pipeline, and print what each stage computes when, its bubble and what it holds.

    F is a forward, B the input half of a backward, W the weight half, BW both in one; then the number of the micro-batch, and
    a, b or c for a stage's first, second or third part.

    A FILE says on which stage each part of the model lies, and what each stage computes in turn. F1.0 is the forward of part 1
    for micro-batch 0:

    \b
        {"place": [0, 1],
         "stages": ["F0.0 F0.1 B0.0 W0.0 BW0.1", "F1.0 BW1.0 F1.1 BW1.1"]}
    """
    if process.launched().rank > 0:
        return  # rank 0 speaks for all
    from mpitrain.errors import ConfigError
    from mpitrain.pipeline.files import find_plan, write_plan
    from mpitrain.pipeline.instructions import with_messages
    from mpitrain.pipeline.simulate import Cost, simulate
    from mpitrain.plan.chart import chart, streaming, summary

    takes_time = any(amounts[f"{half}_ms"] for half in HALVES)
    if not (takes_time and all(value == 0 or LEAST <= value <= MOST for value in amounts.values())):
        raise ConfigError(f"Times and sizes are 0 or from {LEAST:g} to {MOST:g}, and a stage takes time, but these are "
                          + ", ".join(f"{option} {value:g}" for option, value in amounts.items()) + ".",
                          f"Give one of {', '.join(f'--{half}-ms' for half in HALVES)} more than 0.")
    if json_file and name in STREAMS:
        raise ConfigError(f"A file has the order of one step, but {name} goes on over the ends of steps.",
                          "Leave out --json, or write that of 1f1b.")
    plan = find_plan(name, stages, micro_batches, chunks)
    check_files(0, [json_file], plot_file)
    share = len(plan.lists) / len(plan.place)
    cost = Cost(*(share * amounts[f"{half}_ms"] for half in HALVES), *(share * 1e6 * amounts[f"{kept}_mb"] for kept in KEPT))
    costs = [cost] * len(plan.place)
    simulation = simulate(with_messages(plan), costs, amounts["transfer_ms"], amounts["receive_ms"])
    title = f"{name}: {len(plan.lists)} stage(s), {plan.micro_batches} micro-batch(es)"
    lines = [title, "", *chart(plan, simulation, columns()), "", *summary(plan, simulation, costs)]
    if name in STREAMS:
        lines += streaming(plan, simulation, STREAMS[name](len(plan.lists)))
    click.echo("\n".join(lines))
    if json_file:
        write_plan(json_file, plan)
        click.echo(f"written to {json_file}")
    if plot_file:
        from mpitrain.plan.picture import draw

        draw(plan, simulation, f"{title}, bubble {100 * simulation.bubble:.1f}%", plot_file)
        click.echo(f"drawn in {plot_file}")


@command.command("allreduce")
@click.option("--algorithm", default="ring", show_default=True, help="Any that is made of messages.")
@click.option("--ranks", type=click.IntRange(1, 256), default=4, show_default=True, help="Ranks that reduce.")
@click.option("--hosts", type=click.IntRange(1, 256), default=1, show_default=True, help="Hosts that they are on, in blocks.")
@click.option("--bytes", "nbytes", type=Bytes(), help="Also say what each rank sends of an array of so many bytes, float32.")
def allreduce(algorithm: str, ranks: int, hosts: int, nbytes: int | None) -> None:
    """Print an all-reduce step by step.

    0>1 +2 is: rank 0 sends chunk 2 to rank 1, which adds it to its own; 0>1 =2: which puts it in the place of its own.
    """
    if process.launched().rank > 0:
        return
    from mpitrain.errors import ConfigError
    from mpitrain.plan.collective import amounts, printed

    if hosts > ranks:
        raise ConfigError(f"Every host has a rank, but there are {ranks} ranks on {hosts} hosts.", f"Take at most {ranks} hosts.")
    names = [f"host {rank * hosts // ranks}" for rank in range(ranks)]
    click.echo("\n".join(printed(algorithm, names, columns())))
    if nbytes is not None:
        click.echo("\n" + "\n".join(amounts(algorithm, names, nbytes)))
