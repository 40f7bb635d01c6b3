"""`mpitrain eval`: the held-out loss of a checkpoint."""

from pathlib import Path

import click

from mpitrain.cli.ending import ranks


@click.command()
@click.argument("run", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--data", metavar="SOURCE", help="Evaluate on this source instead of the run's own.")
def command(run: Path, data: str | None) -> None:
    """Evaluate the newest checkpoint of RUN_DIR on the held-out rows of its data source."""
    with ranks() as transport:
        from mpitrain import checkpoint
        from mpitrain.session import open_run
        from mpitrain.trainer import build
        from mpitrain.transport.agree import agreed

        config, found = open_run(transport, run, {"data": {"source": data}} if data else None)
        trainer, source = build(transport, config)
        agreed(transport, lambda: checkpoint.load(found, trainer, with_state=False))
        loss, accuracy = trainer.evaluate(source)
        if transport.rank == 0:
            click.echo(f"{run} at step {found.step} on {config.data.source}: validation loss {loss:.4f} nats, "
                       f"{accuracy:.1%} of predictions right ({source.held_out} rows)")
