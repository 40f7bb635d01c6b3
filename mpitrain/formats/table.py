"""The table of formats by name."""

import json
from pathlib import Path

from mpitrain.errors import CheckpointError
from mpitrain.formats import bert, gpt2, llama, phi3
from mpitrain.formats.folder import (
    CONFIGURATION,
    Format,
    ModelType,
    OtherModel,
    configuration,
    names,
    refusing,
)
from mpitrain.formats.peft import PEFT
from mpitrain.tables import Table

FORMATS: Table[str, Format] = Table(
    gpt2=gpt2.FORMAT, llama=llama.FORMAT, phi3=phi3.FORMAT, bert=bert.FORMAT, peft=PEFT
)
"""Formats of folders that `mpitrain export --to` writes and `run.init_from` reads."""

LACKING = {
    "gpt_oss": "sinks in attention, biases of experts, clamped gates",
    "gemma3": "images; its text model alone is gemma3_text",
}
"""{model_type that is refused: what it has that no model here has}."""


def has_model(folder: Path) -> bool:
    """Return whether a folder looks like one of FORMATS; False if it cannot be read."""
    try:
        present = names(folder)
    except CheckpointError:
        return False
    return any(row.file in present for row in FORMATS.values())


def format_of(folder: Path) -> Format:
    present = names(folder)
    fitting = [row for row in FORMATS.values() if row.file in present]
    if not fitting:
        raise CheckpointError(
            f"{folder} is neither a run nor a folder of {' or '.join(FORMATS)}: it has no config.toml and no "
            f"{CONFIGURATION}.",
            "Name a folder with a model, or the directory of a run.",
        )
    # Adapters may lie beside a copy of their model's configuration.
    if of_any_model := [row for row in fitting if not row.models]:
        return of_any_model[0]
    known = {model: row for row in fitting for model in row.models}
    with refusing(folder):
        own = configuration(folder, CONFIGURATION, ModelType).model_type
        if own in known:
            return known[own]
        listed, lacks = ", ".join(known), f" ({LACKING[own]})" if own in LACKING else ""
        raise OtherModel(
            f"{CONFIGURATION} says model_type {json.dumps(own)[:80]}{lacks}, but mpitrain has {listed}"
        )
