"""The table of formats by name."""

from pathlib import Path

from mpitrain.errors import CheckpointError
from mpitrain.formats.folder import CONFIGURATION, Format, names
from mpitrain.formats.gpt2 import GPT2
from mpitrain.formats.peft import PEFT
from mpitrain.tables import Table

FORMATS: Table[str, Format] = Table(gpt2=GPT2, peft=PEFT)
"""Formats of folders that `mpitrain export --to` writes and `run.init_from` reads."""


def format_of(folder: Path) -> Format:
    present = names(folder)
    for row in FORMATS.values():
        if row.is_own(present):
            return row
    raise CheckpointError(
        f"{folder} is neither a run nor a folder of {' or '.join(FORMATS)}: it has no config.toml and no "
        f"{CONFIGURATION}.",
        "Name a folder with a model, or the directory of a run.",
    )
