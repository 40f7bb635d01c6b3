"""`mpitrain plan micro-batches`: predicts the best number of micro-batches from a measurement."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.job_options import (
    CONFIG_FILE,
    DEVICE,
    DP,
    SET,
    TP,
    Outputs,
    changes,
    check_files,
    configured,
    output_option,
)
from mpitrain.cli.session import MOST, mpi_session


@click.command("micro-batches")
@CONFIG_FILE
@SET
@DP
@TP
@click.option("--pp", type=int, metavar="N", help="Pipeline stages.")
@DEVICE
@click.option(
    "--verify", is_flag=True, help="Measure steps with the best number and with its neighbours."
)
@click.option(
    "--blocks",
    type=click.IntRange(1, MOST),
    default=5,
    show_default=True,
    help="For --verify: turns of each number.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, MOST),
    default=5,
    show_default=True,
    help="For --verify: steps in a turn.",
)
@output_option("--json", "Write all predictions and the measurement to this file.")
def command(
    config_file: Path | None,
    settings: tuple[str, ...],
    verify: bool,
    blocks: int,
    steps: int,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Predict the best number of micro-batches: mpitrain launch -n 2 -- plan micro-batches --pp 2

    It measures the stages once, with micro-batches of a few sizes while all ranks work. It also
    measures the messages between stages, and the end of a step. The simulator then predicts the
    time of a step for every number of micro-batches.
    """
    changed = changes(settings, **options)
    read = cache(lambda: configured(config_file, changed))
    with mpi_session(kind=lambda: read().device.kind) as transport:
        _plan(transport, read, (blocks, steps) if verify else None, json_file)


def _plan(
    transport: Any,
    configured: Callable[[], Any],
    verified: tuple[int, int] | None,
    json_file: Path | None,
) -> None:
    """Measure, and print the predictions; `verified` has the blocks and steps of --verify."""
    from mpitrain.parallel.tensor.sequence import sequences_of
    from mpitrain.run.build import build
    from mpitrain.run.resolve import agree_on, resolve
    from mpitrain.tools.bench.results import machine, write_json
    from mpitrain.tools.plan.micro_batches import (
        advice,
        best,
        counts,
        explanation,
        neighbours,
        predict,
        sizes,
        table,
    )
    from mpitrain.tools.plan.stages import end_s, measure
    from mpitrain.transport.agreement import on_all_ranks

    agreed = agree_on(transport, configured)
    config = agreed.config
    on_all_ranks(transport, lambda: check_files(transport.rank, [json_file]))
    resolved = resolve(transport, agreed)
    stages, rows = resolved.axes.pp, config.batch.size // resolved.axes.dp
    choices = on_all_ranks(transport, lambda: counts(config, stages, rows))
    job = build(transport, agreed)
    trainer = job.trainer
    inputs, targets = trainer.replication.rows.batch(job.data, 0)
    measured = measure(trainer, inputs, targets, sizes(choices, rows, sequences_of(config)))
    ending = end_s(trainer, inputs[: measured[0].rows], targets[: measured[0].rows])
    lowest = trainer.pipe.lowest
    predicted = predict(config, stages, rows, choices, measured, ending, lowest)
    is_root, message, outputs = transport.rank == 0, measured[-1].way, Outputs()
    protocol = "eagerly" if message.is_eager else "by rendezvous"
    if is_root:
        click.echo(
            f"{stages} stages by {config.pipeline.schedule}, {rows} rows in each of {resolved.axes.dp} replica(s), "
            f"{trainer.parameter_count:,} parameters, {trainer.config.device.kind}\n"
            f"measured with {', '.join(str(measurement.rows) for measurement in measured)} row(s) in a micro-batch; of "
            f"{measured[-1].rows} a message, sent {protocol}, takes\n"
            f"{1e3 * message.transfer:.2f} ms beside compute and {1e3 * message.receive:.2f} "
            f"ms of its receiver's; the end of a step {1e3 * ending:.2f} ms\n"
        )
        click.echo("\n".join(table(predicted)))
        click.echo("".join(f"\n{line}" for line in explanation(config, stages, rows, measured)))
        click.echo("\n".join(advice(predicted)))
        if json_file:
            named = None if best(predicted).is_spoilt else best(predicted).micro_batches
            with outputs.to(json_file):
                write_json(
                    json_file,
                    {
                        "best": named,
                        "end_s": ending,
                        **machine(transport),
                        "measured": measured,
                        "arguments": sys.argv[1:],
                    },
                    predicted,
                )
    if verified:
        near = neighbours(predicted)
        # The model is cut into the same stages as in the measurement.
        config = config.model_copy(update={"pipeline": trainer.config.pipeline})
        job.close()
        _verify(transport, config, job.source, near, *verified)
    on_all_ranks(transport, outputs.settle)


def _verify(
    transport: Any, config: Any, source: Any, predicted: list[Any], blocks: int, steps: int
) -> None:
    from mpitrain.config import with_settings
    from mpitrain.run.build import build
    from mpitrain.run.choices import parse
    from mpitrain.tools.bench.training.steps import STAGES, WARM_UP, Ours, alternate, stage_rows
    from mpitrain.tools.plan.micro_batches import best

    sides = []
    for prediction in predicted:
        settings = [
            f"batch.micro_batches={prediction.micro_batches}",
            f"run.steps={WARM_UP + blocks * steps}",
        ]
        sides.append(
            Ours(
                build(
                    transport, parse(with_settings(config.model_dump(), settings)), source=source
                ),
                str(prediction.micro_batches),
            )
        )
    results = alternate(transport, sides[0].job, sides, blocks, steps)
    named, quiet = best(predicted), [result for result in results if not result.is_spoilt]
    chosen = sides[predicted.index(named)].job
    rows = stage_rows(chosen.trainer, *chosen.trainer.replication.rows.batch(chosen.data, 0))
    for side in sides:
        side.close()
    if transport.rank == 0:
        click.echo(f"\n{'micro-batches':>13} {'predicted ms':>13} {'measured ms':>12}   blocks")
        for prediction, result in zip(predicted, results, strict=True):
            mark = "~" if result.is_spoilt else " "
            click.echo(
                f"{prediction.micro_batches:>13} {1e3 * prediction.step_s:>13.2f} {1e3 * result.step_s:>12.2f}{mark}  "
                f"{1e3 * min(result.blocks):.2f} .. {1e3 * max(result.blocks):.2f}"
            )
        own = results[predicted.index(named)]
        if own in quiet:
            fastest = min(quiet, key=lambda result: result.step_s)
            click.echo(
                f"measured best: {fastest.name}; a step of {named.micro_batches} takes "
                f"{own.step_s / fastest.step_s:.3f} times as long"
            )
        if len(quiet) < len(results):
            click.echo(
                f"~ {len(results) - len(quiet)} of {len(results)} counts say nothing: other work ran most of the time"
            )
        click.echo(
            f"\nstages of {named.micro_batches} micro-batches:\n" + "\n".join(STAGES.lines(rows))
        )
