"""`mpitrain compare`: trains one job in several modes, layouts and tricks, and prints a table."""

import sys
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.bench.rows import BenchReport
from mpitrain.cli.job_options import (
    DEVICE,
    changes,
    configured,
    counted,
    language_option,
    output_option,
)
from mpitrain.cli.session import mpi_session

JOBS: dict[str, tuple[str, ...]] = {
    "small": (
        "model.layers=2",
        "model.width=64",
        "model.heads=4",
        "model.context=64",
        "batch.size=128",
    ),
    "large": (
        "model.layers=3",
        "model.width=384",
        "model.heads=8",
        "model.context=16",
        "batch.size=8",
    ),
}
"""{--job: its settings}: a small model with a large batch, and a large model with a small batch.

In the first, activations are most of the memory. In the second, parameters and their state are.
"""
EVALUATED = 512
"""Rows of the evaluation: evaluating all of them would take longer than the steps."""


@click.command()
@click.option(
    "--modes",
    metavar="A,B",
    help="Modes to compare: all-reduce algorithms such as star, ring or auto; zero1, zero2, zero3, "
    "also as zero1-host ..., sharded within each host; other modes of replication; layouts such as "
    "tp2, pp2:gpipe or pp2:async; precisions bf16 and fp16; accumulate4, recompute, lora8, tiled, "
    "wire:int8; several joined by +, such as zero3+tp2. Default: star, ring, auto, and "
    "all modes of replication without -host.",
)
@click.option(
    "--job",
    type=click.Choice([*JOBS]),
    help="A built-in job: a small model with a large batch, or a large model with a small batch. "
    "--set changes it.",
)
@counted("--steps", 2, 30, "Optimizer steps of each mode.")
@counted(
    "--blocks",
    1,
    3,
    "Number of times that each mode is trained, in turns. The median of their times counts.",
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
@language_option(is_passed=False)
def command(
    modes: str | None,
    job: str | None,
    steps: int,
    blocks: int,
    settings: tuple[str, ...],
    device: str | None,
    **files: Path | None,
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
        measure_modes(transport, modes, changed, blocks, files)


def measure_modes(
    transport: Any,
    modes: str | None,
    changes: list[str],
    blocks: int,
    files: dict[str, Path | None],
) -> None:
    from mpitrain.tools.bench.comparison.compare import (
        compare,
        footer,
        memory_table,
        mode_table,
        plot,
        spread,
    )
    from mpitrain.tools.bench.comparison.modes import check_resolved, jobs, usual
    from mpitrain.tools.bench.results import header
    from mpitrain.transport.agreement import on_all_ranks

    words = list(dict.fromkeys(modes.split(","))) if modes else usual()
    configs = on_all_ranks(transport, lambda: jobs(words, changes, transport.hosts))
    check_resolved(transport, configs)
    job = next(iter(configs.values()))
    steps = job.run.steps
    facts = header(transport, "compare", job.device.kind, sys.argv[1:])
    facts |= {"steps": steps, "blocks": blocks}
    title = (
        f"{job.model.kind}, {job.model.layers} layers of width {job.model.width} on {job.data.source}: {steps} steps "
        f"of {job.batch.size} rows by {transport.size} ranks on {facts['hosts']} host(s), {job.precision.compute}"
    )
    shown = BenchReport(transport, facts, files)
    rows, table = shown.rows, mode_table(words, shown.rows)
    machine_line = f"{facts['processor']}, {facts['cores']} cores; {facts['mpi']}"
    shown.begin([title, machine_line, "", *table.heading()], len(configs) * steps * blocks, "steps")

    def stepped(mode: str, loss: float) -> None:
        shown.count(f"{mode}, loss {loss:.3f}")

    for row in compare(transport, configs, stepped, blocks):
        rows.append(row)
        shown.show(table.line(row))
    shown.end(
        lambda: ["", *memory_table(rows), "", *spread(rows), *footer(rows)],
        lambda path: plot(rows, title, path),
    )
