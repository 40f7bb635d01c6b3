"""The chat template in a folder of HuggingFace, as one text that needs no other file, and its writing."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mpitrain.data.templates import as_jinja, with_names
from mpitrain.files import text_of
from mpitrain.formats.folder import configuration, refusing

TEMPLATE, SETTINGS, SPECIAL = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
DEFAULT, TOOL_USE = "default", "tool_use"
FURTHER = "additional_chat_templates"
"""The folder in which transformers keeps templates other than `default`."""
TOOLS, BREAK = f"{FURTHER}/{TOOL_USE}.jinja", "\n"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens whose names a template of transformers may use as variables."""


class _Settings(BaseModel):
    """The keys of tokenizer_config.json, or of special_tokens_map.json, that templates use."""

    model_config = ConfigDict(extra="allow")

    chat_template: str | list[dict[str, str]] | None = None


def chat_template(folder: Path, base: Path | None = None) -> str:
    """Return the chat template in a folder; empty if there is none.

    base  the folder of the model, if the first one has adapters: special tokens have its names, unless
          the first one says others

    Of several templates it is the one with the name `default`; as in transformers, `tool_use` writes
    conversations with tools. The names of special tokens are set in the text itself.
    """
    with refusing(folder):
        templates = dict[str, str]()
        if (folder / SETTINGS).exists():
            templates = _named(configuration(folder, SETTINGS, _Settings).chat_template)
        if (folder / TEMPLATE).exists():
            templates[DEFAULT] = text_of(folder / TEMPLATE).decode()
        if (folder / TOOLS).exists():
            templates[TOOL_USE] = text_of(folder / TOOLS).decode()
    text = templates.get(DEFAULT, "")
    if text and (tools := templates.get(TOOL_USE)):
        # An empty text keeps white space that a block would remove beside it.
        tools, text = (
            f"{{{{ '' }}}}{one.removesuffix(BREAK)}{{{{ '' }}}}" for one in (tools, text)
        )
        text = f"{{% if tools is not none %}}{tools}{{% else %}}{text}{{% endif %}}"
    if not text:
        return ""
    return with_names(text, {**(special_names(base) if base else {}), **special_names(folder)})


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


def _named(templates: str | list[dict[str, str]] | None) -> dict[str, str]:
    if not isinstance(templates, list):
        return {DEFAULT: templates or ""}
    return {one.get("name", ""): one.get("template", "") for one in templates}


def template_files(template: str) -> dict[str, bytes]:
    """Return {name: content} of the file with which transformers writes the same text."""
    return {TEMPLATE: as_jinja(template).encode()}
