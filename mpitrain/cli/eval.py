"""`mpitrain eval`: the held-out loss of a checkpoint."""

import json
from pathlib import Path

import click

from mpitrain.cli.ending import ranks


@click.command()
@click.argument("run", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--data", metavar="SOURCE", help="Evaluate on this source instead of the run's own.")
def command(run: Path, data: str | None) -> None:
    """Evaluate the newest checkpoint of RUN_DIR on the held-out rows of its data source."""
    with ranks() as transport:
        from mpitrain.session import open_run

        job = open_run(transport, run, [f"data.source={json.dumps(data)}"] if data else [])
        loss, accuracy = job.trainer.evaluate(job.source)
        if transport.rank == 0:
            click.echo(f"{run} at step {job.step} on {job.trainer.config.data.source}: validation loss {loss:.4f} nats, "
                       f"{accuracy:.1%} of predictions right ({job.source.held_out} rows)")
