"""The files beside a folder's tensors: special tokens, generation, tokenizer and chat template.

A run copies those of run.init_from into the folder init_from of its own directory, and an export writes
them again, so that a model ends its texts in transformers as it did there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.config import CONFIG
from mpitrain.files import text_of
from mpitrain.formats.chat import FURTHER, SETTINGS, SPECIAL, TEMPLATE
from mpitrain.formats.folder import CONFIGURATION, json_text, names, refusing
from mpitrain.strict_json import parsed

INIT_FROM = "init_from"
"""The folder in a run directory that has the companions of run.init_from."""
GENERATION = "generation_config.json"
OF_MODEL = (CONFIGURATION, GENERATION)
OF_TOKENIZER = (
    "tokenizer.json",
    SETTINGS,
    SPECIAL,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    TEMPLATE,
)
TOKEN = "_token_id"
"""The end of those keys of config.json that name special tokens."""
EOS, LONGEST = "eos_token_id", "model_max_length"

Companions = Mapping[str, bytes]
"""{name: content} of the files beside the tensors; a name may begin with that of a folder."""


def companions(folder: Path, chosen: Sequence[str] = (*OF_MODEL, *OF_TOKENIZER)) -> Companions:
    """Return the chosen companions in a folder; CheckpointError for one that cannot be used."""
    with refusing(folder):
        present = names(folder)
        files = {name: text_of(folder / name) for name in chosen if name in present}
        for name in OF_MODEL:
            _of_json(files, name)
        if TEMPLATE in chosen and FURTHER in present:
            for name in names(folder / FURTHER):
                if name.endswith(".jinja"):
                    path = folder / FURTHER / name
                    files[f"{FURTHER}/{name}"] = text_of(path)
        return files


def of_folder(folder: Path, chosen: Sequence[str] = (*OF_MODEL, *OF_TOKENIZER)) -> Companions:
    """Return the companions of a model in a folder: {} for a run that began with random ones."""
    present = names(folder) if folder.exists() else []
    if INIT_FROM in present:
        return companions(folder / INIT_FROM, chosen)
    return companions(folder, chosen) if present and CONFIG not in present else {}


def special_tokens(files: Companions) -> dict[str, Any]:
    """Return the keys of config.json that name special tokens."""
    settings = _of_json(files, CONFIGURATION)
    return {key: value for key, value in settings.items() if key.endswith(TOKEN)}


def ends(files: Companions) -> list[int]:
    """Return the tokens at which generation ends in transformers."""
    value = _of_json(files, _of_ends(files)).get(EOS)
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def with_end(files: Companions, token: int) -> Companions:
    """Return the companions with another token at which generation ends."""
    name = _of_ends(files)
    return {**files, name: json_text({**_of_json(files, name), EOS: [*ends(files), token]})}


def _of_ends(files: Companions) -> str:
    """Return the file that says where generation ends; the other one then counts for nothing."""
    return GENERATION if GENERATION in files else CONFIGURATION


def with_context(files: Companions, context: int) -> Companions:
    """Return the companions of a model that reads fewer tokens than the folder's."""
    settings = _of_json(files, SETTINGS)
    longest = settings.get(LONGEST)
    if not isinstance(longest, int | float) or longest <= context:  # null: there is no limit.
        return files
    return {**files, SETTINGS: json_text({**settings, LONGEST: context})}


def _of_json(files: Companions, name: str) -> dict[str, Any]:
    """Return an object of JSON, {} if there is no such file; ValueError if it is damaged."""
    try:
        value = parsed(files.get(name, b"{}"))
    except ValueError as error:
        raise ValueError(f"{name} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} is damaged: it is no object")
    end = value.get(EOS)
    if not all(type(token) is int for token in (end if isinstance(end, list) else [end or 0])):
        raise ValueError(f"{name} says {EOS} {end!a}, which is no token, nor a list of tokens")
    return value
