"""Words that `mpitrain compare` has replaced: `bench train`, `bench generate`, `plan tricks`. They go with the next version."""

from pathlib import Path
from typing import Any

import click

from mpitrain.cli.bench.rows import CSV, JSON
from mpitrain.cli.compare import (
    BACKENDS,
    LEAST_BLOCKS,
    ONE_RANK,
    PRODUCTS,
    ROW_SECONDS,
    TORCH,
    WINDOWS,
    TrainingJob,
    run_generation,
    run_kept,
    run_shapes,
    run_tricks,
)
from mpitrain.cli.job_options import (
    CP,
    DEVICE,
    GEMM,
    PP,
    PRESET,
    SET,
    TP,
    Finite,
    changes,
    counted,
    output_option,
)
from mpitrain.cli.session import MOST


@click.command("train", hidden=True)
@DEVICE
@GEMM
@CP
@TP
@PP
@click.option("--against", "others", multiple=True, metavar="SECTION.KEY=VALUE")
@click.option("--alone", is_flag=True)
@click.option("--peer", "peers", type=click.Choice(TORCH), multiple=True)
@click.option("--peer-backend", "backends", type=click.Choice(BACKENDS), multiple=True)
@click.option("--floor", is_flag=True)
@click.option("--shapes", metavar="all|A,B")
@click.option("--row-seconds", type=Finite(0, min_open=True))
@counted("--blocks", 1, 5, "Turns of each side.")
@counted("--steps", 1, 10, "Training steps in a turn.")
@PRESET
@SET
@output_option("--json", "Write the rows to this JSON file.")
def train(
    others: tuple[str, ...],
    alone: bool,
    peers: tuple[str, ...],
    backends: tuple[str, ...],
    floor: bool,
    shapes: str | None,
    row_seconds: float | None,
    blocks: int,
    steps: int,
    preset: str | None,
    settings: tuple[str, ...],
    json_file: Path | None,
    **options: Any,
) -> None:
    """Now `mpitrain compare --kept`: compare --kept job SECTION.KEY=VALUE --peer torch"""
    has_shapes = shapes is not None
    if row_seconds is not None and not has_shapes:
        raise click.UsageError("--row-seconds bounds the rows of --shapes. Add --shapes.")
    if has_shapes and (others or alone or preset):
        raise click.UsageError("--shapes takes no --against, --alone and --preset.")
    if backends and not (peers or has_shapes):
        raise click.UsageError("--peer-backend is the backend of a --peer. Add --peer torch.")
    work = TrainingJob(
        changes(settings, **options), blocks, steps, preset, outputs={"json_file": json_file}
    )
    rivals = [
        (peer, backend)
        for peer in peers or (TORCH if has_shapes else ())
        for backend in backends or BACKENDS[:1]
    ]
    if shapes is not None:
        run_shapes(work, shapes, rivals, row_seconds or ROW_SECONDS)
        return
    named = [f"{peer}:{backend}" for peer, backend in rivals]
    named += [ONE_RANK] * alone + [PRODUCTS] * floor
    run_kept(work, ["job", *([[*others]] if others else [])], named)


@click.command("generate", hidden=True)
@click.argument("model", metavar="[RUN_DIR]", required=False)
@DEVICE
@TP
@PP
@click.option("--tokens", "count", type=click.IntRange(1, MOST))
@counted("--prompt-tokens", 1, 1, "Tokens of each prompt.")
@counted("--batch", 1, 1, "Prompts.")
@click.option("--windows", is_flag=True)
@counted("--blocks", 1, 5, "Turns of each side.")
@SET
@JSON
@CSV
def generate(
    model: str | None,
    count: int | None,
    prompt_tokens: int,
    batch: int,
    windows: bool,
    blocks: int,
    settings: tuple[str, ...],
    json_file: Any,
    csv_file: Any,
    **options: Any,
) -> None:
    """Now `mpitrain compare --generate`: compare --generate --set run.init_from=RUN_DIR"""
    changed = changes(settings, **options, base=model)
    files = {"json_file": json_file, "csv_file": csv_file}
    work = TrainingJob(changed, blocks, 1, outputs=files)
    run_generation(work, (), (count, prompt_tokens, batch), [WINDOWS] * windows, True)


def tricks_of(job_options: Any) -> click.Command:
    """Return `plan tricks`.

    job_options  the options of a job of the group `plan`
    """

    @click.command("tricks", hidden=True)
    @job_options
    @click.option("--tricks", "names", metavar="A,B")
    @counted("--blocks", LEAST_BLOCKS, LEAST_BLOCKS, "Turns of the job.")
    @counted("--steps", 1, 3, "Steps of a turn.")
    @output_option("--json", "Write the rows to this JSON file.")
    def tricks(
        config_file: Path | None,
        preset: str | None,
        settings: tuple[str, ...],
        names: str | None,
        blocks: int,
        steps: int,
        json_file: Path | None,
        **options: Any,
    ) -> None:
        """Now `mpitrain compare --tricks`: compare job.toml --tricks all"""
        changed = changes(settings, **options)
        files = {"json_file": json_file}
        work = TrainingJob(changed, blocks, steps, preset, config_file, outputs=files)
        run_tricks(work, names)

    return tricks
