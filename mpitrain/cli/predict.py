"""`mpitrain predict`: writes the predictions of a checkpoint for arrays, images and labelled texts."""

from pathlib import Path
from typing import Any

import click

from mpitrain.cli.job_options import Outputs, changes, check_files, path_option, run_options
from mpitrain.cli.session import configured_of, mpi_session
from mpitrain.errors import ConfigError, visible


@click.command()
@path_option(
    "--out",
    "File of the predictions: numbers or probabilities (rows, ...), or classes (rows,).",
    required=True,
    metavar="FILE.npy",
)
@click.option(
    "--data",
    metavar="SOURCE",
    help="Predict all rows of this source, which needs no y and no labels.",
)
@run_options
def command(run: Path, out: Path, best: bool, **options: Any) -> None:
    """Write what a run predicts for held-out rows, or for other arrays.

    RUN_DIR may also be a folder of transformers, with --data. Numbers have the unit of the targets
    that the run was trained on.
    """
    configured = configured_of(run, changes((), **options))
    with mpi_session(kind=lambda: configured().device.kind) as transport:
        import numpy as np

        from mpitrain.data import targets_of
        from mpitrain.files import whole
        from mpitrain.models.table import MODELS, form_for
        from mpitrain.run.build import open_run
        from mpitrain.run.predictions import predicted
        from mpitrain.transport.agreement import on_all_ranks

        def check() -> None:
            check_files(transport.rank, [out])
            config = configured()
            if form_for(config.model.kind, config.data.source) == "tokens":
                raise ConfigError(
                    f"`predict` is for samples, images and labelled texts, but a {config.model.kind} reads "
                    f"{config.data.source} as tokens.",
                    "Use `mpitrain generate`."
                    if MODELS[config.model.kind].writes
                    else "Fine-tune it with labelled texts, and predict with that run.",
                )

        on_all_ranks(transport, check)
        job = open_run(transport, run, configured, best=best)
        parts = [outputs for outputs, _ in predicted(job, range(job.data.held_out))]
        y, outputs = np.concatenate(parts), Outputs()
        if targets_of(job.data) == "classes":
            y = y.argmax(1)
        elif scaling := getattr(job.data, "scaling", None):
            y = y.reshape(len(y), *scaling.y_shape)
        if transport.rank == 0:
            with outputs.to(out), whole(out) as file:
                np.save(file, y)
            click.echo(f"{visible(str(out))}: {y.dtype} of shape {y.shape}")
            for number, label in enumerate(getattr(job.data, "labels", ())):
                click.echo(f"  {number} {visible(label)}: {np.sum(y == number)}")
        on_all_ranks(transport, outputs.settle)
