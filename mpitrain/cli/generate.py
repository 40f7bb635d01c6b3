"""`mpitrain generate`: generates text from a checkpoint."""

import codecs
import os
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.job_options import OWN_DEVICE, PLUGINS, PP, TP, changes
from mpitrain.cli.numbers import finite
from mpitrain.cli.session import MOST, configured_of, mpi_session
from mpitrain.errors import visible


@click.command()
@click.argument("run", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option(
    "--prompt",
    default="\n",
    help="Text to continue (default: a line break); token numbers if the run knows no tokenizer.",
)
@click.option(
    "--tokens",
    "count",
    type=click.IntRange(1, MOST),
    default=400,
    show_default=True,
    help="Number of tokens to draw.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    callback=finite,
    default=0.8,
    show_default=True,
    help="Sampling temperature; 0 takes the likeliest token.",
)
@click.option(
    "--top-k",
    type=click.IntRange(0, MOST),
    default=40,
    show_default=True,
    help="Draw among this many likeliest tokens; 0: all.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the draws."
)
@click.option(
    "--raw", is_flag=True, help="Write the bytes without escapes, even if they are not text."
)
@TP
@PP
@OWN_DEVICE
@PLUGINS
def command(
    run: Path,
    prompt: str,
    count: int,
    temperature: float,
    top_k: int,
    seed: int,
    raw: bool,
    **options: Any,
) -> None:
    """Generate text with the newest checkpoint of RUN_DIR.

    Bytes that are not UTF-8, and control characters, are shown as \\x.. unless --raw is given.
    """
    settings = changes((), **options)
    configured = configured_of(run, settings)
    with mpi_session(kind=lambda: configured().device.kind) as transport:
        from mpitrain.run.generate import tokenizer_of_run, tokens
        from mpitrain.run.open_run import open_run
        from mpitrain.transport.agreement import on_all_ranks

        trainer, source, _ = open_run(transport, run, configured, needs_data=False)
        config = trainer.config
        tokenizer = on_all_ranks(transport, lambda: tokenizer_of_run(run, config.data))
        start = on_all_ranks(
            transport, lambda: _prompt(prompt, tokenizer, config.model.kind, source.inputs)
        )

        drawn = islice(tokens(trainer, start, temperature, top_k, seed), count)
        written = (
            tokenizer.stream(drawn, start)
            if tokenizer
            else (f" {token}".encode() for token in drawn)
        )
        parts = chain([os.fsencode(prompt)], written, [b"\n"])
        for part in parts if raw else readable(parts):
            if transport.rank == 0:
                sys.stdout.buffer.write(part)
                sys.stdout.buffer.flush()


def readable(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes with escapes that are safe on a terminal or in a log.

    Invalid UTF-8, control characters, and characters that standard output cannot encode become
    \\x.. and similar escapes.
    """
    decoder, encoding = (
        codecs.getincrementaldecoder("utf-8")("backslashreplace"),
        sys.stdout.encoding or "utf-8",
    )
    for part in chain(parts, [None]):
        text = decoder.decode(part or b"", final=part is None)
        yield visible(text).encode(encoding, "backslashreplace")


def _prompt(prompt: str, tokenizer: Any, kind: str, vocabulary: int) -> list[int]:
    """Return the prompt as tokens of a model of this kind; ConfigError if it has others."""
    from mpitrain.errors import ConfigError
    from mpitrain.models.table import MODELS, kinds

    if not MODELS[kind].writes:
        raise ConfigError(
            f"Only a {' or '.join(kinds(lambda row: row.writes))} writes text, but this run trained a {kind}.",
            "Name another run.",
        )
    if not prompt:
        raise ConfigError(
            "A prompt needs at least one token.", "Leave out --prompt to begin with a line break."
        )
    if tokenizer:
        return _encoded(prompt, tokenizer, vocabulary)
    try:
        if not re.fullmatch(r"[0-9\s+-]*", prompt, re.ASCII):  # int() also accepts 1_0 for 10
            raise ValueError
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


def _encoded(prompt: str, tokenizer: Any, vocabulary: int) -> list[int]:
    """Return the tokens of a prompt, at least one; ConfigError if the model does not know them."""
    from mpitrain.data.tokenizer import ByteTokenizer
    from mpitrain.errors import ConfigError

    if isinstance(tokenizer, ByteTokenizer):
        return list(os.fsencode(prompt))  # which need not be text
    found: list[int] = tokenizer.encode(prompt).tolist()
    if not found or max(found) >= vocabulary:
        raise ConfigError(
            f"A prompt needs at least one token, and all below {vocabulary}, but {prompt!r} has {found[:8]}.",
            "Give --prompt another text.",
        )
    return found
