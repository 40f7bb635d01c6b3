"""`mpitrain train`: builds the configured training job and runs it."""

import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

import click

from mpitrain.cli import STOPPED
from mpitrain.cli.job_options import (
    ALGORITHM,
    CONFIG_FILE,
    CP,
    DATA,
    DEVICE,
    DP,
    EP,
    EPOCHS,
    GEMM,
    LR,
    PP,
    PRESET,
    SET,
    STEPS,
    TP,
    changes,
    path_option,
)
from mpitrain.cli.session import mpi_session
from mpitrain.cli.terminal.output import be_courtesy, open_output
from mpitrain.cli.terminal.stop_requests import Stop
from mpitrain.machine import process

ESCAPES = 20
"""A sample is shown only if at most one of so many characters is a byte that is no text."""


class TrainCommand(click.Command):
    """A Click command whose `--resume` needs no value."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        words: list[str] = []
        for word in args:
            # Only "auto" is a value of --resume; any other next word is an argument of its own.
            if word == "auto" and words[-1:] == ["--resume=yes"]:
                words[-1] = "--resume=auto"
            else:
                words.append("--resume=yes" if word == "--resume" else word)
        return super().parse_args(context, words)


@click.command(cls=TrainCommand)
@CONFIG_FILE
@PRESET
@SET
@click.option("--out", metavar="DIR", help="Run directory (default runs/<date>-<n>).")
@click.option(
    "--resume",
    type=click.Choice(["yes", "auto"]),
    default=None,
    metavar="[=auto]",
    help="Resume the run in --out from its newest checkpoint; =auto starts a run if there is none.",
)
@DATA
@STEPS
@EPOCHS
@LR
@DP
@CP
@EP
@TP
@PP
@DEVICE
@GEMM
@ALGORITHM
@click.option(
    "--help-config",
    "described",
    is_flag=False,
    flag_value="all",
    metavar="[=WORD]",
    help="Print the configuration keys, all, of a section, or with this word, and exit.",
)
@path_option(
    "--write-config",
    "Write the keys of a first run with comments to this TOML file, and exit.",
    "config_to_write",
)
def command(
    config_file: Path | None,
    preset: str | None,
    settings: tuple[str, ...],
    resume: str | None,
    described: str | None,
    config_to_write: Path | None,
    **options: Any,
) -> None:
    """Train a network on all ranks of the MPI job.

    Without arguments, it trains a small GPT on the text of Python's own documentation. The
    defaults are batches of 32 sequences of 128 tokens over all ranks (batch.size, model.context),
    400 steps (run.steps). The optimizer is AdamW, with betas 0.8 and 0.95, and weight decay 0.1 of
    matrices. Its learning rate is 0.002 after 20 steps of warm-up, with cosine decay to a tenth.
    Gradients are clipped to norm 1.
    """
    if described is not None:
        from mpitrain.cli.config_help import print_keys
        from mpitrain.config import tables_of
        from mpitrain.config.plugins import load

        load(tables_of(config_file, settings))
        print_keys(described)
        return
    changed = changes(settings, **options)
    if config_to_write:
        from mpitrain.cli.config_help import write_keys
        from mpitrain.machine.process import launched

        if launched().rank == 0:
            write_keys(config_to_write, _configured(config_file, changed, resume or "no", preset))
        return
    be_courtesy()
    configured = cache(lambda: _configured(config_file, changed, resume or "no", preset))
    stop = Stop()
    with mpi_session(
        kind=lambda: configured().device.kind,
        patience=lambda: configured().run.stall_seconds,
        does_trace=lambda: configured().run.trace,
        grace=lambda: configured().run.grace,
        kernels=lambda: _kernels_of_run(config_file, changed) if resume else None,
    ) as transport:
        finished = _train(transport, configured, resume or "no", stop)
    sys.exit(STOPPED if finished.stopped else 0)


def _train(transport: Any, configured: Callable[[], Any], resume: str, stop: Stop) -> Any:
    from mpitrain.cli.terminal.progress import Progress
    from mpitrain.machine.time_limit import JobEnd
    from mpitrain.models.table import MODELS
    from mpitrain.run.loop import train

    stop.connected(transport.rank)
    first = process.launched().rank

    def begins() -> None:
        stop.note()
        if transport.rank == 0 < first:  # This rank succeeds a lost rank 0, and prints from now on.
            sys.stdout = sys.__stdout__
            open_output()
            be_courtesy()

    with ExitStack() as closed:
        end = cache(lambda: closed.enter_context(closing(JobEnd(process.environment()))))

        def ends() -> float | None:
            return end()() if transport.rank == 0 else None

        watchers = [Progress(stop.say)]
        finished = train(transport, configured, resume, stop.asked, watchers, begins, ends)
    stop.ended()
    is_root = transport.rank == 0
    config = finished.job.trainer.config
    shows_samples = config.run.sample_prompt or config.data.template
    if (
        finished.job.step < config.run.steps
        and config.run.sample
        and not shows_samples
        and MODELS[config.model.kind].writes
        and not finished.stopped
    ):
        _print_sample(finished, stop.asked)
    if is_root and not finished.stopped:
        _say_next(finished)
    stop.over()
    return finished


def _say_next(finished: Any) -> None:
    """Print the run directory, and the commands that a user types next.

    With checkpoint.best they take the best checkpoint, if that is not the newest one.
    """
    from mpitrain.errors import CheckpointError, visible
    from mpitrain.models.table import MODELS
    from mpitrain.run.run_dir import checkpoint_of

    config, run = finished.job.trainer.config, visible(shlex.quote(str(finished.folder)))
    best = ""
    with suppress(CheckpointError):
        chosen, newest = (checkpoint_of(finished.folder, is_best) for is_best in (True, False))
        best = " --best" * (config.checkpoint.best and chosen != newest)
    writer = ["chat" if config.data.template else "generate"] * MODELS[config.model.kind].writes
    predictor = ["predict --out y.npy"] * (finished.job.data.form != "tokens")
    report = ["runs report"] * config.run.trace
    print(f"the run is in {run}; next:")
    for words in ("eval", *writer, *predictor):
        print(f"  mpitrain {words} {run}{best}")
    for words in ("runs plot", *report):
        print(f"  mpitrain {words} {run}")
    sys.stdout.flush()


def configured_by(arguments: list[str]) -> Any:
    """Return the configuration that the arguments of `train` ask for."""
    options = dict(command.make_context("train", arguments).params)
    config_file, preset, settings, resume = (
        options.pop(name) for name in ("config_file", "preset", "settings", "resume")
    )
    for only_printed in ("described", "config_to_write"):
        options.pop(only_printed)
    return _configured(config_file, changes(settings, **options), resume or "no", preset)


def _configured(
    config_file: Path | None, settings: list[str], resume: str, preset_name: str | None = None
) -> Any:
    """Return the configuration of the file over the preset, with the settings applied.

    Without a file, a resumed run has its own configuration, and a preset counts as settings.
    """
    from mpitrain.config import merged, tables_of, with_settings
    from mpitrain.config.plugins import load
    from mpitrain.errors import ConfigError
    from mpitrain.run.choices import parse
    from mpitrain.run.run_dir import (
        check_algorithms_named,
        configuration,
        held_out_as_before,
        is_run,
    )

    then = None
    names = {setting.partition("=")[0].strip() for setting in settings}
    if "run.steps" in names:
        if "run.epochs" in names:
            raise ConfigError(
                "A run has a number of steps or of epochs, but got both.", "Leave one of them out."
            )
        settings = [*settings, "run.epochs=0.0"]
    out = with_settings({}, settings).get("run", {}).get("out")
    tables = tables_of(config_file, preset_name=preset_name)
    if not config_file and resume != "no" and isinstance(out, str) and is_run(Path(out)):
        load(with_settings({}, settings))  # `configuration` asks for the plugins of the run.
        then = configuration(Path(out))
        check_algorithms_named(then, settings, Path(out))
        # A resumed run may have another number of ranks, so the layout is not taken over.
        own = {**then.model_dump(), "layout": {}, "pipeline": {}}
        own["data"] = held_out_as_before(then.data, settings)
        # Else each resume would fail again, and a run directory could name code to run.
        own["run"] = {**own["run"], "inject": "", "watchers": []}
        tables = merged(own, tables)
        stages = with_settings(tables, settings)["layout"].get("pp", 1)
        if isinstance(stages, int) and stages > then.batch.micro_batches:
            # More stages than before may need more micro-batches: 0 chooses their number.
            tables["batch"]["micro_batches"] = 0
    tables = with_settings(tables, settings)
    if resume != "no" and config_file:
        tables = _as_begun(tables)
    elif then:
        from mpitrain.run.model_keys import with_adapter_of_run

        tables = with_adapter_of_run(tables, then)
    return parse(tables, config_file)


def _kernels_of_run(config_file: Path | None, settings: list[str]) -> str | None:
    """Return the kernels of OpenBLAS with which the run to resume began, before NumPy is imported."""
    from mpitrain.config import tables_of
    from mpitrain.errors import ConfigError
    from mpitrain.machine.blas_kernels import recorded_in

    with suppress(ConfigError, OSError, KeyError, TypeError):
        tables = tables_of(config_file, settings)
        return recorded_in(Path(str(tables["run"]["out"])) / "metrics.jsonl")
    return None


def _as_begun(tables: dict[str, Any]) -> dict[str, Any]:
    """Add the keys that a run took from the folder of run.init_from, which may be gone by now."""
    from mpitrain.config.plugins import load
    from mpitrain.run.model_keys import with_adapter_of_run, with_keys
    from mpitrain.run.run_dir import configuration, is_run

    run = tables.get("run")
    out = run.get("out") if isinstance(run, dict) and run.get("init_from") else None
    if not isinstance(out, str) or not is_run(Path(out)):
        return tables
    load(tables)  # `configuration` asks for the plugins of the run.
    then = configuration(Path(out))
    return with_adapter_of_run(with_keys(tables, then.flat()), then)


def _print_sample(finished: Any, stop_requested: Callable[[], bool]) -> None:
    """Print a short generated text; token numbers if no tokenizer is known. Collective."""
    from mpitrain.cli.generate import readable
    from mpitrain.errors import ConfigError, DataError, TrainingError
    from mpitrain.run.generate import samples

    job, message = finished.job, "a sample of what it writes:\n"
    try:
        texts = samples(job.trainer, finished.folder, job.source.inputs, [""], stop_requested)
        text = b"".join(readable([texts[0].encode()]))
        if text.count(b"\\x") * ESCAPES > len(text):
            text, message = b"", "no sample of what it writes: most of it is no text yet"
    except (TrainingError, ConfigError, DataError) as error:
        text, message = b"", f"no sample of what it writes: {error.law}"
    if job.trainer.transport.rank == 0:
        sys.stdout.buffer.write(message.encode() + text + b"\n")
        sys.stdout.buffer.flush()
