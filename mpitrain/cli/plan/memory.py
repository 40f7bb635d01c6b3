"""`mpitrain plan memory`: counts the activations and FLOPs of a job before it is launched."""

from pathlib import Path
from typing import Any

import click

from mpitrain.cli.job_options import (
    CONFIG_FILE,
    DEVICE,
    DP,
    PP,
    PRESET,
    SET,
    TP,
    changes,
    configured,
)
from mpitrain.machine import process


@click.command("memory")
@CONFIG_FILE
@PRESET
@SET
@DP
@TP
@PP
@DEVICE
def command(
    config_file: Path | None, preset: str | None, settings: tuple[str, ...], **options: Any
) -> None:
    """Count the activations and the FLOPs of a job, unit by unit, without running it.

    One process counts the ranks of the configured layout; --dp defaults to 1. Bytes are those of
    the arena of a real step. GFLOP are those of matrix products, forward and backward.
    """
    if process.launched().rank > 0:
        return  # only rank 0 prints
    from mpitrain.tools.plan.memory import count, table

    job = configured(config_file, changes(settings, **options), preset)
    click.echo("\n".join(table(count(job))))
