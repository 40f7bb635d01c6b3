"""`mpitrain data`: makes files of tokens from text, trains tokenizers, and shows files of tokens."""

import shlex
import sys
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import click

from mpitrain.cli import STOPPED, CommandGroup, RootCommand
from mpitrain.cli.job_options import counted, measured, path_option
from mpitrain.cli.session import MOST, mpi_session
from mpitrain.errors import visible
from mpitrain.machine import process

INPUTS = click.argument(
    "inputs", metavar="IN...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
FIELD = click.option(
    "--field",
    default="text",
    show_default=True,
    metavar="NAME",
    help="Key of a line of JSON, or column of a Parquet file, with the text.",
)
MARK = click.option(
    "--document-mark",
    "mark",
    default="",
    metavar="TEXT",
    help="Text between two documents of a text file (default: the file is one document).",
)
BAR = "{percentage:3.0f}% |{bar}| {remaining} left"


@click.group(cls=CommandGroup)
def command() -> None:
    """Make files of tokens from text, train tokenizers, and show files of tokens.

    These commands need one process and no MPI; prepare can also use the ranks of an MPI job. A
    tokenizer file needs the package tokenizers: pip install 'mpitrain[text]'.
    """


@command.command()
@INPUTS
@click.option(
    "--tokenizer",
    "name",
    required=True,
    metavar="FILE|bytes",
    help="A tokenizer.json of HuggingFace, or bytes.",
)
@path_option(
    "--out",
    "Directory for train.bin, val.bin, meta.json and a copy of the tokenizer.",
    required=True,
    metavar="DIR",
)
@measured(
    "--validation-fraction",
    0,
    0.1,
    "Share of the documents for val.bin, drawn at random; of one document its end. 0: no val.bin.",
    into="fraction",
    most=0.9,
)
@counted("--seed", 0, 0, "Seed of the draws.", most=2**62)
@click.option(
    "--separator",
    metavar="TOKEN|none",
    help="Name or number of the token behind each document (default: the tokenizer's end of text).",
)
@click.option(
    "--template",
    metavar="TEXT",
    help="Template of conversations (default: that in the folder of the tokenizer, else that of data.template).",
)
@FIELD
@MARK
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Number of processes (default: one per core); not for several ranks.",
)
def prepare(
    inputs: tuple[Path, ...],
    name: str,
    out: Path,
    fraction: float,
    seed: int,
    separator: str | None,
    template: str | None,
    field: str,
    mark: str,
    workers: int | None,
) -> None:
    """Write the tokens of text files, of JSON (.jsonl, .json) or of Parquet files.

    If the records are conversations, only their answers will be trained on.

    An interrupted command continues if it is repeated. No file has its name before it is
    complete. In an MPI job all ranks encode: mpitrain launch -n 4 -- data prepare ...
    """
    from mpitrain.data.documents import Form

    form = Form(fraction, seed, field, mark, template or "")
    if process.launched().size == 1:
        from mpitrain.data.prepare import processes

        _prepare(inputs, name, out, separator, form, processes(workers or process.cores()))
        return
    if workers:
        raise click.UsageError("--workers is for one process; here the ranks encode.")
    with mpi_session() as transport:
        from mpitrain.cli.rank_encoders import RankEncoders, serve
        from mpitrain.transport.agreement import on_all_ranks

        def on_root() -> None:
            with closing(RankEncoders(transport)) as ranks:
                _prepare(inputs, name, out, separator, form, ranks.start)

        on_all_ranks(transport, on_root if transport.rank == 0 else lambda: serve(transport))


def _prepare(
    inputs: tuple[Path, ...], name: str, out: Path, separator: str | None, form: Any, start: Any
) -> None:
    """Write the tokens of the files under a progress bar, and print their number.

    form   a `documents.Form`
    start  an `encode.Start`
    """
    from mpitrain.cli.terminal.progress import bar, of_records
    from mpitrain.data.conversations import Recognised
    from mpitrain.data.documents import first_record
    from mpitrain.data.documents import inputs as sizes
    from mpitrain.data.prepare import Options, prepare
    from mpitrain.data.templates import with_day
    from mpitrain.data.tokenizer import BYTES_NAME, ends_of_text, read_tokenizer
    from mpitrain.errors import ConfigError
    from mpitrain.formats.chat import chat_template

    tokenizer = read_tokenizer(name)
    ends = _separator(separator, tokenizer)
    total = sum(file.nbytes for file in sizes(inputs))
    given = with_day(form.template or chat_template(Path(name).parent), date.today().isoformat())
    recognised = Recognised(given, ends_of_text("" if name == BYTES_NAME else name, tokenizer))
    if recognised.begin(first_record(inputs[0])):
        form, ends = form._replace(template=recognised.template), -1
    elif form.template:
        raise ConfigError(
            f"--template is of conversations, but {inputs[0]} has none.",
            "Leave it out, or name a file of conversations first: .jsonl, .json or .parquet.",
        )
    options = Options(inputs, tokenizer, ends, form, recognised)
    try:
        with closing(bar(total, form=BAR)) as shown:
            shown.leave = False
            facts = prepare(
                options, out, start, lambda nbytes: shown.update(nbytes - shown.n) and None
            )
    except KeyboardInterrupt:
        click.echo(f"stopped; the same command goes on in {visible(str(out))}")
        sys.exit(STOPPED)
    for file, counts in facts.files.items():
        click.echo(
            f"{visible(str(out / file))}: {counts.documents:,} {'conversation' if form.template else 'document'}(s), "
            f"{counts.bytes:,} bytes, "
            f"{counts.tokens:,} tokens, {counts.tokens / max(1, counts.bytes):.3f} per byte"
        )
    if words := of_records(recognised.facts):
        click.echo(words)
    token = "none" if facts.separator < 0 else facts.separator
    click.echo(f"{facts.dtype}, vocabulary {facts.vocabulary:,}, separator {token}")
    source = shlex.quote(f"tokens:{out / 'train.bin'}")
    click.echo(f"next: mpitrain launch -n 2 -- train --data {visible(source)}")


def _separator(name: str | None, tokenizer: Any) -> int:
    """Return the token that is written behind each document; -1: none."""
    from mpitrain.errors import ConfigError

    if name is None:
        return int(tokenizer.separator)
    if name == "none":
        return -1
    named = tokenizer.named(name)
    token = int(name) if named is None and name.isascii() and name.isdigit() else named
    if token is None or not 0 <= token < tokenizer.vocabulary:
        raise ConfigError(
            f"--separator must be a token of the tokenizer or none, but is {name!r}.",
            f"Give its name, or a number from 0 to {tokenizer.vocabulary - 1}.",
        )
    return int(token)


@command.command("train-tokenizer", cls=RootCommand)
@INPUTS
@click.option(
    "--vocab",
    "vocabulary",
    type=click.IntRange(258, MOST),
    required=True,
    metavar="N",
    help="Largest number of tokens.",
)
@path_option(
    "--out", "Tokenizer file to write, such as tokenizer.json.", required=True, metavar="FILE"
)
@FIELD
@MARK
def train_tokenizer(
    inputs: tuple[Path, ...], vocabulary: int, out: Path, field: str, mark: str
) -> None:
    """Train a byte-level BPE tokenizer, as GPT-2's, on text files, .jsonl or Parquet files."""
    from mpitrain.cli.terminal.output import width
    from mpitrain.data.documents import Form, texts
    from mpitrain.data.documents import inputs as sizes
    from mpitrain.data.tokenizer import check_tokenizers, train_tokenizer
    from mpitrain.files import cannot_write, check_writable

    check_tokenizers("mpitrain data train-tokenizer")
    check_writable(out)
    sizes(inputs)
    try:
        tokenizer = train_tokenizer(
            texts(inputs, Form(0, 0, field, mark)), vocabulary, out, width() is not None
        )
    except OSError as error:
        raise cannot_write(out, error) from None
    click.echo(f"{visible(str(out))}: {tokenizer.vocabulary:,} tokens")
    words = ["mpitrain", "data", "prepare", *map(str, inputs), "--tokenizer", str(out)]
    click.echo(f"next: {visible(shlex.join([*words, '--out', str(out.parent / 'tokens')]))}")


@command.command(cls=RootCommand)
@click.argument("file", metavar="FILE")
@counted("--rows", 1, 4, "Number of windows, spread evenly.")
@counted("--tokens", 1, 64, "Tokens of a window.", into="count")
@click.option(
    "--tokenizer",
    "name",
    metavar="FILE|bytes",
    help="Tokenizer that decodes (default: that of mpitrain data prepare, else bytes).",
)
def show(file: str, rows: int, count: int, name: str | None) -> None:
    """Print windows of a file of tokens as text. FILE may be a pattern, as 'train_*.bin'."""
    import numpy as np

    from mpitrain.cli.generate import readable
    from mpitrain.data.token_files import token_paths, tokenizer_beside, tokens_of, windows
    from mpitrain.data.tokenizer import BYTES_FILE, open_tokenizer, read_tokenizer

    tokens = tokens_of(file)
    data = tokenizer_beside(token_paths(file)[0]) or BYTES_FILE
    tokenizer = read_tokenizer(name) if name else open_tokenizer(data, file)
    count = min(count, len(tokens))
    starts = np.unique(np.linspace(0, len(tokens) - count, rows).astype(np.int64))
    click.echo(f"{visible(file)}: {len(tokens):,} tokens, {tokens.dtype.name}")
    for start, row in zip(starts, windows(tokens, starts, count), strict=True):
        is_text = row.max() < tokenizer.vocabulary
        text = tokenizer.decode(row.tolist()) if is_text else " ".join(map(str, row)).encode()
        click.echo(f"--- token {start:,}{'' if is_text else ', numbers'}")
        sys.stdout.flush()
        sys.stdout.buffer.write(b"".join(readable([text, b"\n"])))
        sys.stdout.buffer.flush()
