"""`mpitrain generate`: generates text from a checkpoint."""

import codecs
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.job_options import (
    Finite,
    changes,
    counted,
    measured,
    path_option,
    run_options,
    with_options,
)
from mpitrain.cli.session import configured_of, mpi_session
from mpitrain.errors import visible

sampling_options = with_options(
    counted("--tokens", 1, 400, "Most tokens of a text.", into="count"),
    measured("--temperature", 0, 0.8, "Sampling temperature; 0 takes the likeliest token."),
    counted("--top-k", 0, 40, "Draw among this many likeliest tokens; 0: all."),
    click.option(
        "--top-p",
        type=Finite(0, 1, min_open=True),
        default=1.0,
        show_default=True,
        help="Draw among the fewest likeliest tokens with this probability together; 1: all.",
    ),
    counted("--seed", 0, 0, "Seed of the draws; prompt i, from 0, has seed + i.", most=None),
)
"""The options that say how to draw tokens, as in `Sampling`."""


@click.command()
@click.option(
    "--prompt",
    "prompt_texts",
    multiple=True,
    metavar="TEXT",
    help="Text to continue (repeatable; default: a line break); token numbers if the run knows no "
    "tokenizer.",
)
@path_option(
    "--prompts",
    'More prompts: one a line; of FILE.jsonl {"prompt": TEXT} a line.',
    "file",
    metavar="FILE",
)
@click.option(
    "--chat",
    "is_chat",
    is_flag=True,
    help="A prompt is what a user says: put it in the template of the run, and write the answer.",
)
@sampling_options
@click.option(
    "--stop",
    "stops",
    multiple=True,
    metavar="TEXT",
    help="End a text before this one (repeatable); token numbers if the run knows no tokenizer.",
)
@click.option(
    "--past-context",
    type=click.Choice(["cut", "stop"]),
    default="cut",
    show_default=True,
    help="At model.context tokens: go on with the newest half of them, or end the text.",
)
@counted("--batch", 1, 16, "Prompts that each replica continues at the same time.")
@click.option("--json", "as_json", is_flag=True, help="Write a JSON object a line for each prompt.")
@click.option(
    "--ignore-eos", is_flag=True, help="Go on after the token that ends a text, as after any other."
)
@run_options
def command(
    run: Path,
    prompt_texts: tuple[str, ...],
    file: Path | None,
    is_chat: bool,
    count: int,
    temperature: float,
    top_k: int,
    top_p: float,
    stops: tuple[str, ...],
    past_context: str,
    batch: int,
    seed: int,
    as_json: bool,
    ignore_eos: bool,
    best: bool,
    **options: Any,
) -> None:
    """Generate text with the newest checkpoint of RUN_DIR.

    RUN_DIR may also be a folder of transformers. Bytes that are not UTF-8, and control characters, are shown as \\x.. escapes.
    """
    settings = changes((), **options)
    configured = configured_of(run, settings)
    with mpi_session(kind=lambda: configured().device.kind) as transport:
        from mpitrain.run.build import open_run
        from mpitrain.run.generate import (
            PromptRequest,
            Sampling,
            continued,
            end_of_turn,
            prompted,
            read_prompts,
        )

        trainer, source, _ = open_run(transport, run, configured, needs_data=False, best=best)
        config, cuts = trainer.config, past_context == "cut"
        tokenizer, prompts, ends = prompted(
            trainer,
            source.inputs,
            run,
            lambda: [*prompt_texts, *(read_prompts(file) if file else [])],
            stops,
            cuts,
            ignore_eos,
            is_chat,
        )
        if config.data.template and not is_chat and transport.rank == 0:
            note = f"note: {run} has a template of conversations, in which --chat puts a prompt; `mpitrain chat` talks"
            click.echo(visible(note), err=True)
        sampling = Sampling(temperature, top_k, top_p)
        turn = end_of_turn(config.data) * (is_chat and not ignore_eos)
        request = PromptRequest(sampling, seed, count, [*stops, *turn], cuts, ends)
        written = continued(trainer, tokenizer, [tokens for _, tokens in prompts], batch, request)
        write = _lines if as_json else _streamed if len(prompts) == 1 else _blocks
        shown = "\n" * (is_chat and not as_json)  # An answer begins a line.
        parts = write([text + shown for text, _ in prompts], written)
        for part in parts if as_json else readable(parts):
            if transport.rank == 0:
                sys.stdout.buffer.write(part)
                sys.stdout.buffer.flush()


def _streamed(prompts: Sequence[str], written: Iterator[Any]) -> Iterator[bytes]:
    """Yield the only prompt, then each part of its text once no stop text can cut it off."""
    yield os.fsencode(prompts[0])
    for piece in written:
        yield piece.text
    yield b"\n"


def _blocks(prompts: Sequence[str], written: Iterator[Any]) -> Iterator[bytes]:
    for index, texts in _ended(len(prompts), written):
        header = b"" if index == 0 else b"\n"
        yield header + b"--- %d ---\n" % (index + 1) + os.fsencode(prompts[index])
        yield b"".join(piece.text for piece in texts) + b"\n"


def _lines(prompts: Sequence[str], written: Iterator[Any]) -> Iterator[bytes]:
    for index, texts in _ended(len(prompts), written):
        text = b"".join(piece.text for piece in texts)
        line = {
            "prompt": os.fsencode(prompts[index]).decode(errors="replace"),
            "text": text.decode(errors="replace"),
            "tokens": texts[-1].tokens,
            "ended": texts[-1].ended,
        }
        yield json.dumps(line).encode() + b"\n"


def _ended(count: int, written: Iterator[Any]) -> Iterator[tuple[int, list[Any]]]:
    """Yield (prompt, its pieces) in the order of the prompts, as soon as its text has ended."""
    pieces: list[list[Any]] = [[] for _ in range(count)]
    following = 0
    for piece in written:
        pieces[piece.prompt].append(piece)
        while following < count and pieces[following] and pieces[following][-1].ended:
            yield following, pieces[following]
            following += 1


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
