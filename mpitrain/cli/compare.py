"""`mpitrain compare`: trains one job in several modes, layouts and tricks, and tabulates them."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.job_options import (
    DEVICE,
    Outputs,
    changes,
    check_files,
    configured,
    output_option,
)
from mpitrain.cli.session import MOST, mpi_session
from mpitrain.tools.bench.comparison.built_in import JOBS

EVALUATED = 512
"""Rows of the evaluation: evaluating all of them would take longer than the steps."""


@click.command()
@click.option(
    "--modes",
    metavar="A,B",
    help="Modes to compare: all-reduce algorithms such as star, ring or auto; zero1, zero2, zero3, "
    "also as zero1-host ..., sharded within each host; other modes of replication; layouts such as "
    "tp2, pp2:gpipe or pp2:async; precisions bf16 and fp16; accumulate4, recompute, lora8, tiled, "
    "compiled, wire:int8; several joined by +, such as zero3+tp2. Default: star, ring, auto, and "
    "all modes of replication without -host.",
)
@click.option(
    "--job",
    type=click.Choice([*JOBS]),
    help="A built-in job: a small model with a large batch, or a large model with a small batch. "
    "--set changes it.",
)
@click.option(
    "--steps",
    type=click.IntRange(2, MOST),
    default=30,
    show_default=True,
    help="Optimizer steps of each mode.",
)
@click.option(
    "--blocks",
    type=click.IntRange(1, MOST),
    default=3,
    show_default=True,
    help="Number of times that each mode is trained, in turns. The median of their times counts.",
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
    job: str | None,
    steps: int,
    blocks: int,
    settings: tuple[str, ...],
    device: str | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Train one job in several modes, in turns, on all ranks of the MPI job.

    A mode is a mode of replication, a layout, a schedule, a precision or a trick such as
    recomputation. A + joins several of these words. All modes have the same model, seed, order of
    the data and global batch. The columns are:

    \b
    step ms     time of a step
    exposed ms  time in a step in which a worker waits for messages
    sent bytes  bytes that the busiest rank sends in a step, also by formula;
                without shared memory and the MPI library's own reductions
    held MB     parameters, gradients, optimizer state and reduction buffers
                on the fullest rank, without activations
    stale       largest staleness of a gradient, in updates
    idle %      time in which a worker waits for messages, mean over workers

    A second table has the memory by kind, with the activations. Its last columns are training
    losses after equal steps and after equal time.
    """
    changed = [
        *JOBS.get(job or "", ()),
        f"run.steps={steps}",
        f"run.eval_rows={EVALUATED}",
        *changes(settings, device=device),
    ]
    with mpi_session(kind=lambda: configured(None, changed).device.kind) as transport:
        _compare(transport, modes, changed, blocks, json_file, plot_file)


def _compare(
    transport: Any,
    modes: str | None,
    changes: list[str],
    blocks: int,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    from tqdm import tqdm

    from mpitrain import __version__
    from mpitrain.cli.terminal.progress import bar
    from mpitrain.tools.bench.collectives.header import machine
    from mpitrain.tools.bench.collectives.table import write_json
    from mpitrain.tools.bench.comparison.grammar import usual
    from mpitrain.tools.bench.comparison.jobs import check_resolved, jobs
    from mpitrain.tools.bench.comparison.measure import compare
    from mpitrain.tools.bench.comparison.table import (
        footer,
        heading,
        line,
        mark,
        memory_table,
        plot,
        spread,
        wide,
    )
    from mpitrain.transport.agreement import on_all_ranks

    words = list(dict.fromkeys(modes.split(","))) if modes else usual()
    configs = on_all_ranks(transport, lambda: jobs(words, changes, transport.hosts))
    check_resolved(transport, configs)
    is_root, first = transport.rank == 0, wide(words)
    on_all_ranks(transport, lambda: check_files(transport.rank, [json_file], plot_file))
    job = next(iter(configs.values()))
    steps = job.run.steps
    facts = {
        "mpitrain": __version__,
        "ranks": transport.size,
        **machine(transport),
        "steps": steps,
        "blocks": blocks,
        "arguments": sys.argv[1:],
    }
    title = (
        f"{job.model.kind}, {job.model.layers} layers of width {job.model.width} on {job.data.source}: {steps} steps "
        f"of {job.batch.size} rows by {transport.size} ranks on {facts['hosts']} host(s), {job.precision.compute}"
    )
    if is_root:
        click.echo(
            f"{title}\n{facts['processor']}, {facts['cores']} cores; {facts['mpi']}\n\n{heading(first)}"
        )
    rows, outputs = [], Outputs()
    with closing(bar(len(configs) * steps * blocks) if is_root else tqdm(disable=True)) as shown:

        def stepped(mode: str, loss: float) -> None:
            shown.set_postfix_str(f"{mode}, loss {loss:.3f}", refresh=False)
            shown.update()

        for row in compare(transport, configs, stepped, blocks):
            rows.append(row)
            if is_root:
                shown.write(line(row, first, mark(row, rows[0])), file=sys.stdout)
                if json_file:
                    with outputs.to(json_file):
                        write_json(json_file, facts, rows)
    outputs.conclude(
        transport,
        lambda: ["", *memory_table(rows), "", *spread(rows), *footer(rows)],
        plot_file,
        lambda path: plot(rows, title, path),
    )
