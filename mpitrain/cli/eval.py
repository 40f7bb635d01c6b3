"""`mpitrain eval`: computes the held-out loss of a checkpoint."""

import math
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.job_options import OWN_DEVICE, PLUGINS, PP, TP, changes
from mpitrain.cli.session import configured_of, mpi_session
from mpitrain.errors import TrainingError, on_every_rank, visible


@click.command()
@click.argument("run", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--data", metavar="SOURCE", help="Evaluate on this source instead of the run's own.")
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    metavar="N",
    help="Held-out rows to evaluate, spread evenly; 0: all (default: as in training).",
)
@TP
@PP
@OWN_DEVICE
@PLUGINS
def command(run: Path, **options: Any) -> None:
    """Evaluate the newest checkpoint of RUN_DIR on the held-out rows of its data source."""
    settings = changes((), **options)
    configured = configured_of(run, settings)
    with mpi_session(kind=lambda: configured().device.kind) as transport:
        from mpitrain.cli.terminal.progress import nats
        from mpitrain.data import TENTH, bits_per_byte
        from mpitrain.run.open_run import open_run
        from mpitrain.run.trainer import evaluated_rows

        job = open_run(transport, run, configured)
        found = job.trainer.evaluate(job.data)
        assert found is not None  # `evaluate` returns None only after a stop request
        loss, accuracy = found
        if transport.rank == 0:
            held_out = job.trainer.config.data.validation
            where = job.trainer.config.data.source if held_out in ("", TENTH) else held_out
            click.echo(
                f"{visible(str(run))} at step {job.step} on {visible(where)}: "
                f"validation loss {nats(loss, bits_per_byte(job.data, loss))}, accuracy {accuracy:.1%} "
                f"({evaluated_rows(job.trainer.config.run, job.data)} of {job.data.held_out} held-out rows)"
            )
        if not math.isfinite(loss):
            raise on_every_rank(
                TrainingError(
                    f"The model's output is not finite: its validation loss is {loss}.",
                    "The run has diverged: train again with a lower optimizer.lr.",
                )
            )
