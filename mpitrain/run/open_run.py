"""Opens a trained run again, for an evaluation or to generate text."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpitrain.config import CONFIG, Config, with_settings
from mpitrain.config.plugins import load
from mpitrain.data import Reading, Unopened, source_kind
from mpitrain.errors import ConfigError
from mpitrain.models.table import MODELS
from mpitrain.run.build import Job, build
from mpitrain.run.checkpoint.directories import newest
from mpitrain.run.choices import parse
from mpitrain.run.given import RunLocation, agree_on
from mpitrain.run.run_dir import (
    CHECKPOINTS,
    configuration,
    held_out_as_before,
    is_run,
    noted_largest,
)
from mpitrain.transport.base import Transport


def trained_configuration(folder: Path, settings: list[str]) -> Config:
    """Return the configuration that a run was last trained with, on one rank.

    settings  name the plugins of the run; other keys are not applied
    raises    ConfigError if there is no run in the directory
    """
    if not is_run(folder):
        raise ConfigError(
            f"There is no run in {folder}: it has no {CONFIG}.", "Name the directory of a run."
        )
    load(with_settings({}, settings))  # `configuration` asks for the plugins of the run.
    return configuration(folder)


def configured(folder: Path, settings: list[str]) -> Config:
    """Return the configuration to open a run directory with, on one rank.

    Keys of layout, replication and pipeline have their defaults, not the values of the run.

    settings  `section.key=value` each, applied last
    raises    ConfigError if there is no run in the directory
    """
    then = trained_configuration(folder, settings)
    check_has_adapters(then, with_settings({}, settings).get("run", {}).get("init_from"))
    # The rows of a micro-batch in training, which fit in the memory of a rank.
    rows = max(1, then.batch.size // (max(1, then.layout.dp) * then.batch.micro_batches))
    anew = ["run.delay=", "run.inject=", "batch.micro_batches=0", f"batch.size={rows}"]
    # The layout of the training run does not matter here, nor how it reduced gradients.
    alone = {**then.model_dump(), "replication": {}, "layout": {}, "pipeline": {}}
    alone["data"] = held_out_as_before(then.data, settings)
    if source := with_settings({}, settings).get("data", {}).get("source"):
        alone["data"] = _read_by(source, alone["data"])
    return parse(with_settings(alone, [*anew, *settings]))


def _read_by(source: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run's data that another source reads, for an evaluation on it."""
    kind = source_kind(source)
    kept = {
        key: value
        for key, value in data.items()
        if kind.does_read(key) or key not in Reading._fields
    }
    if kept.get("separator", -1) < 0 and not kept.get("packing"):
        kept.pop("attend", None)  # Rows of this source have no documents.
    return kept


def check_has_adapters(config: Config, base: str | None) -> None:
    """Raise ConfigError if a base is named for a run that has no adapters.

    base  of --base; empty or None: none
    """
    if base and not config.lora.rank:
        raise ConfigError(
            "--base names the model under adapters, but lora.rank of this run is 0.",
            "Leave out --base.",
        )


def open_run(
    transport: Transport, folder: Path, alone: Callable[[], Config], needs_data: bool = True
) -> Job:
    """Build the job of a run directory from its newest checkpoint; collective.

    The number of ranks may differ from the number in training.

    alone       returns the configuration on one rank, from `configured`
    needs_data  False: build a token model without opening its data source
    """

    def on_these_ranks() -> Config:
        config = alone()
        size = config.batch.size * transport.size
        return config.model_copy(update={"batch": config.batch.model_copy(update={"size": size})})

    def look(config: Config) -> RunLocation:
        saved = newest(folder / CHECKPOINTS)
        largest = noted_largest(folder, config.data.source, config.data.dtype)
        return RunLocation(str(folder), str(saved), True, largest=largest)

    agreed = agree_on(transport, on_these_ranks, look)
    vocabulary = agreed.config.data.vocabulary or 256
    context = agreed.config.model.context
    is_enough = not needs_data and MODELS[agreed.config.model.kind].takes == "tokens"
    source = Unopened("tokens", (context,), vocabulary, vocabulary) if is_enough else None
    return build(transport, agreed, source=source)
