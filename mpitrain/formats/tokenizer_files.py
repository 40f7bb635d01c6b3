"""Tokenizer files of a folder that `transformers.AutoTokenizer` loads."""

import json
from collections.abc import Mapping
from typing import Any

from mpitrain.data.tokenizer import BYTES_FILE, ENDS, TOKENIZER, Tokenizer

SETTINGS = "tokenizer_config.json"
CLASS = "PreTrainedTokenizerFast"
"""The class of the library transformers that reads a tokenizer from tokenizer.json alone."""


def tokenizer_files(tokenizer: Tokenizer, context: int) -> dict[str, bytes]:
    """Return {name: content} of the files that a tokenizer needs.

    context  longest sequence of the model, in tokens
    """
    data = byte_level() if tokenizer.data == BYTES_FILE else tokenizer.data
    settings: dict[str, Any] = {"tokenizer_class": CLASS, "model_max_length": context}
    if tokenizer.separator >= 0:
        ends = [name for name in ENDS if tokenizer.named(name) == tokenizer.separator]
        settings["eos_token"] = settings["bos_token"] = ends[0]
    return {TOKENIZER: data, SETTINGS: _text(settings)}


def byte_level() -> bytes:
    """Return a tokenizer.json with a token for each byte: its number is the byte's value.

    The format names bytes by printable characters, as GPT-2 does.
    """
    step = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: byte for byte, character in enumerate(_characters())},
        "merges": [],
    }
    return _text(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": step,
            "post_processor": None,
            "decoder": step,
            "model": model,
        }
    )


def _characters() -> list[str]:
    """Return the character for each byte: the same number if printable, else one from 256 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), 256),
    }
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _text(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()
