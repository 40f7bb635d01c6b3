"""Opens a trained run again, for an evaluation or to generate text."""

from pathlib import Path

from mpitrain.config import Config, with_settings
from mpitrain.data import Unopened
from mpitrain.errors import ConfigError
from mpitrain.models.table import MODELS
from mpitrain.run.build import Job, build
from mpitrain.run.checkpoint.directories import newest
from mpitrain.run.choices import parse
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
    """Return the configuration to open a run directory with.

    Keys of layout, replication and pipeline have their defaults, not the values of the run.

    settings  `section.key=value` each, applied last
    ranks     number of ranks that open the run; the batch size depends on it
    raises    ConfigError if there is no run in the directory
    """
    if not is_run(folder):
        raise ConfigError(
            f"There is no run in {folder}: it has no {CONFIG}.", "Name the directory of a run."
        )
    then = configuration(folder)
    # The rows of a micro-batch in training, which fit in the memory of a rank.
    rows = max(1, then.batch.size // (max(1, then.layout.dp) * then.batch.micro_batches))
    anew = ["run.delay=", "batch.micro_batches=0", f"batch.size={rows * ranks}"]
    # The layout of the training run does not matter here, nor how it reduced gradients.
    alone = {**then.model_dump(), "replication": {}, "layout": {}, "pipeline": {}}
    alone["data"] = held_out_as_before(then, settings)
    return parse(with_settings(alone, [*anew, *settings]))


def open_run(
    transport: Transport, folder: Path, settings: list[str], needs_data: bool = True
) -> Job:
    """Build the job of a run directory from its newest checkpoint; collective.

    The number of ranks may differ from the number in training.

    settings    `section.key=value` each, instead of the values in the run's configuration
    needs_data  False: build a token model without opening its data source
    """
    config = on_all_ranks(transport, lambda: configured(folder, settings, transport.size))
    saved = transport.gather_text(
        on_all_ranks(transport, lambda: str(newest(folder / CHECKPOINTS)))
    )[0]
    vocabulary = config.data.vocabulary or 256
    is_enough = not needs_data and MODELS[config.model.kind].takes == "tokens"
    return build(
        transport,
        config,
        Path(saved),
        Unopened("tokens", (config.model.context,), vocabulary, vocabulary) if is_enough else None,
        noted_scan(folder),
    )
