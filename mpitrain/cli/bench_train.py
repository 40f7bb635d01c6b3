"""`mpitrain bench train`: seconds per training step, alone or in turns with a peer."""

from typing import Any

import click

from mpitrain.cli.ending import ranks

SHAPE = {"model.layers": 4, "model.width": 256, "model.heads": 4, "model.context": 128, "optimizer.clip": 0.0,
         "optimizer.lr": 1e-3}
SEQUENCES = 16  # per rank


@click.command("train")
@click.option("--peer", type=click.Choice(["torch"]), help="Measure this as well, in turns: PyTorch DDP over gloo.")
@click.option("--blocks", type=click.IntRange(min=1), default=5, show_default=True, help="Turns that each side has.")
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Training steps in a turn.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="Change the configuration (repeatable).")
def command(peer: str | None, blocks: int, steps: int, settings: tuple[str, ...]) -> None:
    """Measure whole training steps of a GPT: 4 layers, width 256, context 128, 16 sequences per rank.

    Both sides start from the same weights and see the same batches, so their losses show that they do the same work.
    """
    with ranks() as transport:
        _measure(transport, peer, blocks, steps, settings)


def _measure(transport: Any, peer: str | None, blocks: int, steps: int, settings: tuple[str, ...]) -> None:
    from mpitrain.bench.train import WARM_UP, Ours, alternate, peer_class, table
    from mpitrain.build import build
    from mpitrain.config import parse, with_settings
    from mpitrain.ops.host.product import mkl
    from mpitrain.transport.agree import agreed

    shape = {**SHAPE, "batch.size": SEQUENCES * transport.size, "run.steps": WARM_UP + blocks * steps}
    lines = [*(f"{key}={value}" for key, value in shape.items()), *settings]
    config = agreed(transport, lambda: parse(with_settings({}, lines)))
    other = agreed(transport, lambda: peer_class(peer, config)) if peer else None
    job = build(transport, config)
    sides: list[Any] = [Ours(job)]
    if other:
        trainer = job.trainer
        arrays = {entry.name: entry.view(trainer.parameters) for entry in trainer.plan.entries}
        sides.append(other(transport, config, job.source.inputs, arrays))
    try:
        results = alternate(transport, job, sides, blocks, steps)
    finally:
        for side in sides:
            side.close()
    if transport.rank == 0:
        tokens = config.batch.size * config.model.context if config.model.kind == "gpt" else 0
        click.echo(f"{transport.size} ranks, {config.batch.size} rows per step, {job.trainer.plan.parameter_count} parameters, "
                   f"all-reduce {config.replication.algorithm}, products by {'MKL' if mkl() else 'NumPy'}; "
                   f"{blocks} blocks of {steps} steps")
        click.echo("\n".join(table(results, tokens)))
