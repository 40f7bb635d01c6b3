"""A run that was trained, opened again: to be evaluated, or to write."""

from pathlib import Path

from mpitrain.config import Config, parse, with_settings
from mpitrain.data import Unopened
from mpitrain.errors import ConfigError
from mpitrain.run.build import Job, build
from mpitrain.run.checkpoint.directories import newest
from mpitrain.run.run_dir import (
    CHECKPOINTS,
    CONFIG,
    configuration,
    held_out_as_before,
    is_run,
    noted_scan,
)
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport


def configured(folder: Path, settings: list[str], ranks: int = 1) -> Config:
    """The configuration of a run directory, to be opened by so many ranks, with `section.key=value` put in."""
    if not is_run(folder):
        raise ConfigError(
            f"There is no run in {folder}: it has no {CONFIG}.", "Name the directory of a run."
        )
    then = configuration(folder)
    rows = max(
        1, then.batch.size // (max(1, then.layout.dp) * then.batch.micro_batches)
    )  # at once on a rank, in training
    anew = ["run.delay=", "batch.micro_batches=0", f"batch.size={rows * ranks}"]
    # Which ranks held what, and how gradients were made, concerns nobody any more.
    alone = {**then.model_dump(), "replication": {}, "layout": {}, "pipeline": {}}
    alone["data"] = held_out_as_before(then, settings)
    return parse(with_settings(alone, [*anew, *settings]))


def open_run(
    transport: Transport, folder: Path, settings: list[str], needs_data: bool = True
) -> Job:
    """The job of a run directory as its newest checkpoint left it, on however many ranks; collective.

    settings    section.key=value, over the configuration of the run
    needs_data  False: a token model is built without its data source
    """
    config = on_all_ranks(transport, lambda: configured(folder, settings, transport.size))
    saved = transport.gather_text(
        on_all_ranks(transport, lambda: str(newest(folder / CHECKPOINTS)))
    )[0]
    vocabulary = config.data.vocabulary or 256
    is_enough = not needs_data and config.model.kind == "gpt"
    return build(
        transport,
        config,
        Path(saved),
        Unopened("gpt", vocabulary, vocabulary) if is_enough else None,
        noted_scan(folder),
    )
