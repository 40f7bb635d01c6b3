"""The table of formats by name."""

from contextlib import suppress
from pathlib import Path

from mpitrain.errors import CheckpointError
from mpitrain.formats.folder import CONFIGURATION, Format, ModelType, configuration, names
from mpitrain.formats.gpt2 import GPT2
from mpitrain.formats.llama import LLAMA
from mpitrain.formats.peft import PEFT
from mpitrain.tables import Table

FORMATS: Table[str, Format] = Table(gpt2=GPT2, llama=LLAMA, peft=PEFT)
"""Formats of folders that `mpitrain export --to` writes and `run.init_from` reads."""


def format_of(folder: Path) -> Format:
    present = names(folder)
    fitting = [row for row in FORMATS.values() if row.is_own(present)]
    model_type = ""
    if any(row.models for row in fitting):
        # A damaged file is an error of the row that reads it.
        with suppress(ValueError, OSError):
            model_type = configuration(folder, CONFIGURATION, ModelType).model_type
    for row in sorted(fitting, key=lambda row: not row.models):
        if not row.models or model_type in row.models:
            return row
    raise CheckpointError(
        f"{folder} is neither a run nor a folder of {' or '.join(FORMATS)}: it has no config.toml and no "
        f"{CONFIGURATION}.",
        "Name a folder with a model, or the directory of a run.",
    )
