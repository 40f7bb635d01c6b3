"""`mpitrain bench train`: measures training steps, in turns with other settings or with PyTorch."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.bench.training.job import ALONE, configured_on, settings_of
from mpitrain.cli.bench.training.shapes import PEERS, measure_shapes
from mpitrain.cli.job_options import (
    DEVICE,
    GEMM,
    PP,
    PRESET,
    SET,
    TP,
    Outputs,
    changes,
    check_files,
    finite,
    output_option,
)
from mpitrain.cli.session import MOST, mpi_session

ROW_SECONDS = 120.0
"""The default of --row-seconds."""


@click.command("train")
@DEVICE
@GEMM
@TP
@PP
@click.option(
    "--against",
    "others",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Measure a second job in turns with the first: the same job with this setting "
    "(repeatable; all settings belong to the second job).",
)
@click.option(
    "--memory",
    is_flag=True,
    help="Measure the job with each key of [memory] in turns: time and peak memory of activations.",
)
@click.option(
    "--alone",
    is_flag=True,
    help="Also measure one rank alone, in turns: it computes the whole batch while the others wait.",
)
@click.option(
    "--peer",
    "peers",
    type=click.Choice(PEERS),
    multiple=True,
    help="Also measure PyTorch over gloo, in turns, with its counterpart of the first job's "
    "replication; torch-compiled is DDP under torch.compile (repeatable).",
)
@click.option(
    "--floor",
    is_flag=True,
    help="Also measure the matrix products of a step alone, in turns, and a step by kind of unit.",
)
@click.option(
    "--shapes",
    metavar="all|NAME[,NAME...]",
    help="Measure a table of shapes instead, on 2 ranks, against all peers: "
    "mpitrain/tools/bench/README.md lists the names.",
)
@click.option(
    "--row-seconds",
    type=click.FloatRange(0, min_open=True),
    callback=finite,
    help="With --shapes: bound of the turns of a shape; compilation comes on top.  [default: 120]",
)
@click.option(
    "--blocks",
    type=click.IntRange(1, MOST),
    default=5,
    show_default=True,
    help="Turns of each side.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, MOST),
    default=10,
    show_default=True,
    help="Training steps in a turn.",
)
@PRESET
@SET
@output_option("--json", "Write the times of all sides to this JSON file, at the end.")
@output_option("--csv", "Write the blocks of all sides to this CSV file, at the end.")
def command(
    others: tuple[str, ...],
    memory: bool,
    alone: bool,
    peers: tuple[str, ...],
    floor: bool,
    shapes: str | None,
    row_seconds: float | None,
    blocks: int,
    steps: int,
    preset: str | None,
    settings: tuple[str, ...],
    json_file: Path | None,
    csv_file: Path | None,
    **options: Any,
) -> None:
    """Measure whole training steps of a GPT: 4 layers, width 256, context 128, 16 sequences a rank.

    A step of a --preset is one of its micro-batches on each rank.

    All sides start from the same weights and see the same batches. So equal losses show that they
    do the same work. For a pipeline, each stage has a line: its messages and peak memory in a step
    of the first job.
    """
    changed = changes(settings, **options)
    if memory and (
        others or alone or peers or floor or shapes is not None or json_file or csv_file
    ):
        raise click.UsageError(
            "--memory measures sides of its own. Leave out --against, --alone, --peer, --floor, --shapes, --json and --csv."
        )
    if row_seconds is not None and shapes is None:
        raise click.UsageError("--row-seconds bounds the rows of --shapes. Add --shapes.")
    if shapes is not None:
        if others or alone or csv_file or preset:
            raise click.UsageError("--shapes takes no --against, --alone, --preset and --csv.")
        turns = blocks, steps, ROW_SECONDS if row_seconds is None else row_seconds
        with mpi_session(kind=lambda: configured_on(1, blocks, steps, changed).device.kind) as all_:
            measure_shapes(
                all_,
                shapes,
                settings_of(),
                changed,
                [*dict.fromkeys(peers or PEERS)],
                turns,
                json_file,
            )
        return
    with mpi_session(
        kind=lambda: configured_on(1, blocks, steps, changed, preset).device.kind
    ) as transport:
        if memory:
            _measure_memory(transport, changed, blocks, steps, preset)
            return
        _measure(
            transport,
            changed,
            list(others),
            alone,
            peers,
            floor,
            blocks,
            steps,
            json_file,
            csv_file,
            preset,
        )


def _measure(
    transport: Any,
    settings: list[str],
    others: list[str],
    alone: bool,
    peers: Sequence[str],
    floor: bool,
    blocks: int,
    steps: int,
    json_file: Path | None,
    csv_file: Path | None,
    preset: str | None = None,
) -> None:
    from mpitrain.cli.terminal.progress import way
    from mpitrain.collectives.selection.tuning import foreign
    from mpitrain.run.build import build
    from mpitrain.tools.bench.collectives.header import header
    from mpitrain.tools.bench.collectives.table import write_csv
    from mpitrain.tools.bench.training.bare_products import BareProducts
    from mpitrain.tools.bench.training.peers import peer_of
    from mpitrain.tools.bench.training.stages import stage_rows, stage_table
    from mpitrain.tools.bench.training.steps import (
        LookingOn,
        Ours,
        alternate,
        block_rows,
        check_common_steps,
        check_same_work,
        named,
        table,
        write_json,
    )
    from mpitrain.tools.bench.training.unit_kinds import ByKind, floor_table, kind_rows
    from mpitrain.transport.agreement import on_all_ranks

    def all_configured() -> list[Any]:
        check_same_work(others)
        configs = [
            configured_on(transport.size, blocks, steps, [*settings, *more], preset)
            for more in ([], others, ALONE)
        ]
        for config in configs:
            check_common_steps(config)
        return configs

    on_all_ranks(transport, lambda: check_files(transport.rank, [json_file, csv_file]))
    first, second, third = on_all_ranks(transport, all_configured)
    job = build(transport, first)
    jobs = [job, build(transport, second, source=job.source)] if others else [job]
    config = job.trainer.config  # here device.kind "auto" is resolved
    sides: list[Any] = [Ours(job, named(job.trainer.config, others)) for job in jobs]
    if alone:
        own = transport.split(None if transport.rank else 0)
        single = on_all_ranks(transport, lambda: own and build(own, third, source=job.source))
        name = "one rank of mpitrain"
        sides.append(Ours(single, name) if single else LookingOn(name))
    rivals = [peer_of(transport, job, peer) for peer in dict.fromkeys(peers)]
    sides += rivals
    compared = len(sides)
    if floor:
        by_kind = ByKind(transport, job)
        sides += [by_kind, bare := BareProducts(by_kind.watch.products)]
    results = alternate(transport, job, sides, blocks, steps)
    kinds = kind_rows(transport, by_kind.seconds, bare.seconds) if floor else []
    of_stages = (
        stage_rows(job.trainer, *job.trainer.replication.rows.batch(job.data, 0))
        if config.layout.pp > 1
        else []
    )
    # After an error no side is closed: closing waits for ranks that may not have the error.
    for side in sides:
        side.close()
    outputs = Outputs()
    facts = header(transport, "train", config.device.kind, sys.argv[1:])
    if transport.rank == 0:
        if config.replication.algorithm == "auto" and (
            advice := foreign(job.trainer.resolved.tuning, transport.hosts)
        ):
            click.echo(f"{advice} in replication.tuning")
        tokens = config.batch.size * config.model.context if job.source.form == "tokens" else 0
        click.echo(
            f"{transport.size} ranks, {config.batch.size} rows per step, "
            f"{job.trainer.parameter_count} parameters, "
            f"{way(config)}, {config.device.kind}, products by {_multiplier(config)}; "
            f"{blocks} blocks of {steps} steps"
        )
        click.echo("\n".join(table(results[:compared], tokens)))
        for note in (note for rival in rivals for note in rival.notes()):
            click.echo(note)
        if floor:
            click.echo("\n" + "\n".join(floor_table(results[0], results[-1], kinds)))
        if of_stages:
            click.echo("\n" + "\n".join(stage_table(of_stages)))
        if json_file:
            with outputs.to(json_file):
                write_json(json_file, facts, results, kinds)
        if csv_file:
            with outputs.to(csv_file):
                write_csv(csv_file, block_rows(results))
    on_all_ranks(transport, outputs.settle)


def _measure_memory(
    transport: Any, changed: list[str], blocks: int, steps: int, preset: str | None = None
) -> None:
    """Print time and activation memory of the job with each key of [memory]. Collective."""
    from mpitrain.cli.terminal.progress import way
    from mpitrain.tools.bench.training.memory import built, memory_table, peaks
    from mpitrain.tools.bench.training.steps import alternate, check_common_steps

    def configured_with(more: Sequence[str]) -> Any:
        config = configured_on(transport.size, blocks, steps, [*changed, *more], preset)
        check_common_steps(config)
        return config

    sides, notes = built(transport, configured_with)
    results = alternate(transport, sides[0].job, sides, blocks, steps)
    nbytes, config = peaks(transport, sides), sides[0].job.trainer.config
    for side in sides:
        side.close()
    if transport.rank == 0:
        click.echo(
            f"{transport.size} ranks, {config.batch.size} rows of {config.model.context} per step, width {config.model.width}, "
            f"{config.model.layers} layers, {way(config)}, {config.device.kind}; {blocks} blocks of {steps} steps"
        )
        click.echo("\n".join([*memory_table(results, nbytes), *notes]))


def _multiplier(config: Any) -> str:
    from mpitrain.ops.host.product import multiplier

    if config.device.kind == "cpu":
        return multiplier()
    library = {"cuda": "cuBLAS", "cuda-sim": "NumPy"}[config.device.kind]
    return library if config.device.gemm == "library" else "our kernels"
