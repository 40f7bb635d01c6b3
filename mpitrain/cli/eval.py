"""`mpitrain eval`: computes the held-out loss of a checkpoint, or its accuracy on tasks."""

import math
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.doctor import write_document
from mpitrain.cli.job_options import (
    CP,
    EP,
    Outputs,
    changes,
    check_files,
    output_option,
    run_options,
)
from mpitrain.cli.session import configured_of, mpi_session
from mpitrain.errors import ConfigError, TrainingError, visible


@click.command()
@click.option("--data", metavar="SOURCE", help="Evaluate on this source instead of the run's own.")
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    metavar="N",
    help="Held-out rows to evaluate, spread evenly; 0: all (default: as in training).",
)
@click.option(
    "--tasks",
    "tasks_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help='Evaluate on multiple-choice tasks instead: {"context", "choices", "answer"} on each line.',
)
@output_option("--json", "Write the numbers to this JSON file.")
@CP
@EP
@run_options
def command(
    run: Path, best: bool, tasks_file: Path | None, json_file: Path | None, **options: Any
) -> None:
    """Evaluate the newest checkpoint of RUN_DIR on the held-out rows of its data source.

    RUN_DIR may also be a folder of transformers, with --data.

    The accuracies on tasks are those of lm-evaluation-harness. acc takes the choice with the
    largest log-likelihood; acc_norm divides by the bytes of each choice.
    """
    if tasks_file and (options["data"] is not None or options["rows"] is not None):
        raise click.UsageError("--tasks takes no held-out rows. Leave out --data and --rows.")
    settings = changes((), **options)
    configured = configured_of(run, settings)
    with mpi_session(kind=lambda: configured().device.kind) as transport:
        from mpitrain.run.metrics import strict
        from mpitrain.transport.agreement import on_all_ranks

        on_all_ranks(transport, lambda: check_files(transport.rank, [json_file]))
        measure = _tasks if tasks_file else _held_out
        line, numbers, is_finite = measure(transport, run, configured, best, tasks_file)
        outputs = Outputs()
        if transport.rank == 0:
            click.echo(line)
            if json_file:
                write_document(outputs, json_file, strict(numbers))
        on_all_ranks(transport, outputs.settle)
        if not is_finite:
            raise TrainingError(
                f"The model's output is not finite: its validation loss is {numbers['loss']}.",
                "The run has diverged: train again with a lower optimizer.lr.",
            ).on_every_rank()


def _held_out(
    transport: Any, run: Path, configured: Any, best: bool, _: Path | None
) -> tuple[str, dict[str, Any], bool]:
    """Return the line to print, the numbers of --json, and whether the loss is finite."""
    from mpitrain.cli.terminal.progress import nats
    from mpitrain.run.build import open_run
    from mpitrain.run.whole import evaluated

    job = open_run(transport, run, configured, best=best)
    config, found = job.trainer.config, evaluated(job)
    held_out = config.data.validation
    where = held_out if ":" in held_out else config.data.source
    numbers = {"run": str(run), "step": job.step, "data": where} | found
    loss, bits, rows, of = (
        found.pop(name) for name in ("loss", "bits_per_byte", "rows", "held_out_rows")
    )
    perplexity = f", perplexity {found.pop('perplexity'):.4g}" if "perplexity" in found else ""
    shown = ", ".join(
        f"{name} {value:.1%}" if name == "accuracy" else f"{name.upper()} {value:.6g}"
        for name, value in found.items()
    )
    unit = f"{loss:.4f}" if "mse" in found else nats(loss, bits)
    at = f"{_named(run, job.step)} on {visible(where)}"
    line = f"{at}: validation loss {unit}{perplexity}, {shown} ({rows} of {of} held-out rows)"
    return line, numbers, math.isfinite(loss)


def _named(run: Path, step: int) -> str:
    from mpitrain.run.run_dir import is_run

    return visible(str(run)) + (f" at step {step}" if is_run(run) else "")


def _tasks(
    transport: Any, run: Path, configured: Any, best: bool, tasks_file: Path | None
) -> tuple[str, dict[str, Any], bool]:
    """Return what `_held_out` returns, for a file of tasks."""
    from zlib import crc32

    from mpitrain.data.tasks import read_tasks
    from mpitrain.models.table import MODELS, kinds
    from mpitrain.run.build import open_run
    from mpitrain.run.generate import tokenizer_of_run
    from mpitrain.run.scoring import score
    from mpitrain.transport.agreement import on_all_ranks

    assert tasks_file is not None
    tasks = on_all_ranks(
        transport,
        lambda: read_tasks(tasks_file),
        "file of tasks",
        lambda tasks: {"--tasks": crc32(repr(tasks).encode())},
    )
    job = open_run(transport, run, configured, needs_data=False, best=best)

    def tokenizer_of_tasks() -> Any:
        kind = job.trainer.config.model.kind
        if not MODELS[kind].writes:
            raise ConfigError(
                f"Tasks are for a {' or '.join(kinds(lambda row: row.writes))}, but this model is a {kind}.",
                "Leave out --tasks.",
            )
        tokenizer = tokenizer_of_run(run, job.trainer.config.data)
        if tokenizer is None:
            raise ConfigError(
                f"Tasks are text, but the run in {run} has no tokenizer.",
                "Train it on data with a tokenizer.json, as `mpitrain data prepare` writes it.",
            )
        return tokenizer

    scores = score(
        job.trainer, tasks, on_all_ranks(transport, tokenizer_of_tasks), job.source.inputs
    )
    numbers = {"run": str(run), "step": job.step, "tasks": str(tasks_file), "count": len(tasks)}
    shown = []
    for name, accuracy in (("acc", scores.acc), ("acc_norm", scores.acc_norm)):
        numbers |= {name: accuracy.mean, f"{name}_stderr": accuracy.stderr}
        error = "" if accuracy.stderr is None else f" +- {accuracy.stderr:.1%}"
        shown.append(f"{name} {accuracy.mean:.1%}{error}")
    numbers["log_likelihoods"] = scores.log_likelihoods
    at = f"{_named(run, job.step)} on {len(tasks)} task(s)"
    return f"{at} of {visible(str(tasks_file))}: {', '.join(shown)}", numbers, True
