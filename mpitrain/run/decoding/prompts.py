"""Prompts: their texts, from options and a file, and their tokens for a model."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.data.tokenizer import ByteTokenizer, Tokenizer
from mpitrain.errors import ConfigError, DataError
from mpitrain.files import contents
from mpitrain.models.table import MODELS, kinds
from mpitrain.strict_json import parsed

JSON_LINES = ".jsonl"


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: one a line, or {"prompt": TEXT} a line if its name ends in .jsonl.

    Empty lines are no prompts.
    raises  DataError if the file is not UTF-8, has another line, or has no prompt; OSError
    """
    try:
        text = contents(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"A file of prompts is UTF-8, but byte {error.start} of {path} is not.",
            "Convert the file, for example with iconv.",
        ) from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix == JSON_LINES:
        prompts = [_prompt_of(line, f"line {number} of {path}") for number, line in lines]
    else:
        prompts = [line.removesuffix("\r") for _, line in lines]
    if not prompts:
        raise DataError(f"A file of prompts has a prompt, but {path} has none.", "Add a line.")
    return prompts


def _prompt_of(line: str, where: str) -> str:
    try:
        value = parsed(line.encode())
    except ValueError as error:
        raise DataError(
            f"Each line of a {JSON_LINES} file is JSON, but {where} is not: {error}.",
            'Write {"prompt": "..."} on each line.',
        ) from None
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise DataError(
            f'Each line of prompts is an object with a text "prompt", but {where} is not.',
            'Write {"prompt": "..."} on each line.',
        )
    return value["prompt"]


def check_writes(kind: str) -> None:
    """Raise ConfigError unless a model of this kind predicts the next token."""
    if not MODELS[kind].writes:
        raise ConfigError(
            f"Only a {' or '.join(kinds(lambda row: row.writes))} writes text, but this run trained a {kind}.",
            "Name another run.",
        )


def encoded(prompt: str, tokenizer: Tokenizer | None, vocabulary: int) -> list[int]:
    """Return the tokens of a prompt, at least one; ConfigError if the model does not know them.

    tokenizer  None: the prompt is the numbers of its tokens
    """
    if not prompt:
        raise ConfigError(
            "A prompt needs at least one token.", "Leave out --prompt to begin with a line break."
        )
    if tokenizer is None:
        return _numbers(prompt, vocabulary)
    if isinstance(tokenizer, ByteTokenizer):
        return list(os.fsencode(prompt))  # The bytes need not be valid UTF-8.
    tokens: list[int] = tokenizer.encode(prompt).tolist()
    if not tokens or max(tokens) >= vocabulary:
        raise ConfigError(
            f"A prompt needs at least one token, and all below {vocabulary}, but {prompt!r} has {tokens[:8]}.",
            "Give --prompt another text.",
        )
    return tokens


def _numbers(prompt: str, vocabulary: int) -> list[int]:
    try:
        numbers = [int(word) for word in prompt.split()] or [0]
    except ValueError:
        raise ConfigError(
            f"A model of token numbers takes numbers as its prompt, but got {prompt!r}.",
            'For example: --prompt "17 4 120"',
        ) from None
    if not all(0 <= number < vocabulary for number in numbers):
        raise ConfigError(
            f"Tokens must lie in 0..{vocabulary - 1}, but the prompt is {prompt!r}.",
            "Use known tokens.",
        )
    return numbers


def check_room(prompts: Sequence[Sequence[Any]], context: int) -> None:
    """Raise ConfigError if a prompt leaves no room for a token within the context."""
    longest = max(map(len, prompts))
    if longest >= context:
        raise ConfigError(
            f"With --past-context stop a prompt is shorter than model.context {context}, but one has {longest} tokens.",
            "Shorten it, or leave out --past-context.",
        )
