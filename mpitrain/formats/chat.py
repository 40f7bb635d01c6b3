"""The chat template in a folder of HuggingFace, as one text that needs no other file, and its writing."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mpitrain.data.templates import as_jinja, with_names
from mpitrain.files import text_of
from mpitrain.formats.folder import BENEATH, configuration, refusing

TEMPLATE, SETTINGS, SPECIAL = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens whose names a template of transformers may use as variables."""


class _Settings(BaseModel):
    """The keys of tokenizer_config.json, or of special_tokens_map.json, that templates use."""

    model_config = ConfigDict(extra="allow")

    chat_template: str | list[dict[str, str]] | None = None


def chat_template(folder: Path) -> str:
    """Return the chat template in a folder; empty if there is none.

    Of several templates it is the one with the name `default`. The names of special tokens are set
    in the text itself.
    """
    text = ""
    with refusing(folder):
        if (folder / SETTINGS).exists():
            text = _default(configuration(folder, SETTINGS, _Settings).chat_template)
        if (folder / TEMPLATE).exists():
            text = text_of(folder / TEMPLATE, BENEATH).decode()
    return with_names(text, special_names(folder)) if text else ""


def special_names(folder: Path) -> dict[str, str]:
    """Return the names of special tokens in a folder, such as {"bos_token": "<s>"}."""
    names = dict[str, str]()
    with refusing(folder):
        for file in (SPECIAL, SETTINGS):
            if (folder / file).exists():
                settings = configuration(folder, file, _Settings)
                for name in NAMES:
                    value = (settings.model_extra or {}).get(name)
                    value = value.get("content") if isinstance(value, dict) else value
                    if isinstance(value, str):
                        names[name] = value
    return names


def _default(templates: str | list[dict[str, str]] | None) -> str:
    if not isinstance(templates, list):
        return templates or ""
    return {one.get("name"): one.get("template", "") for one in templates}.get("default", "")


def template_files(template: str) -> dict[str, bytes]:
    """Return {name: content} of the file with which transformers writes the same text."""
    return {TEMPLATE: as_jinja(template).encode()}
