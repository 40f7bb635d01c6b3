"""`mpitrain data`: makes files of tokens from text, trains tokenizers, and shows files of tokens."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

from mpitrain.cli import STOPPED, CommandGroup
from mpitrain.cli.job_options import finite
from mpitrain.cli.session import MOST, mpi_session
from mpitrain.data.meta import Counts
from mpitrain.data.prepare.documents import DocumentPiece
from mpitrain.data.prepare.encode import (
    Encoded,
    Encoder,
    Encoding,
    LocalEncoder,
    Result,
    encoded_pieces,
)
from mpitrain.data.tokenizer import open_tokenizer
from mpitrain.errors import DataError, MpitrainError, visible
from mpitrain.machine import process
from mpitrain.transport.base import Transport

INPUTS = click.argument(
    "inputs",
    metavar="IN...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
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
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Directory for train.bin, val.bin, meta.json and a copy of the tokenizer.",
)
@click.option(
    "--validation-fraction",
    "fraction",
    type=click.FloatRange(0, 0.9),
    callback=finite,
    default=0.1,
    show_default=True,
    help="Share of the documents for val.bin, drawn at random; of one document its end. 0: no val.bin.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**62), default=0, show_default=True, help="Seed of the draws."
)
@click.option(
    "--separator",
    metavar="TOKEN|none",
    help="Name or number of the token behind each document (default: the tokenizer's end of text).",
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
    field: str,
    mark: str,
    workers: int | None,
) -> None:
    """Write the tokens of text files, lines of JSON (.jsonl) or Parquet files.

    An interrupted command continues if it is repeated. No file has its name before it is
    complete. In an MPI job all ranks encode: mpitrain launch -n 4 -- data prepare ...
    """
    from mpitrain.data.prepare.documents import Form

    form = Form(fraction, seed, field, mark)
    if process.launched().size == 1:
        from mpitrain.data.prepare.encode import processes

        _prepare(inputs, name, out, separator, form, processes(workers or process.cores()))
        return
    if workers:
        raise click.UsageError("--workers is for one process; here the ranks encode.")
    with mpi_session() as transport:
        from mpitrain.cli.data import RankEncoders, serve
        from mpitrain.transport.agreement import on_all_ranks

        def on_root() -> None:
            with closing(RankEncoders(transport)) as ranks:
                _prepare(inputs, name, out, separator, form, ranks.start)

        on_all_ranks(transport, on_root if transport.rank == 0 else lambda: serve(transport))


def _prepare(
    inputs: tuple[Path, ...], name: str, out: Path, separator: str | None, form: Any, start: Any
) -> None:
    """Prepare the files with a progress bar, and print their sizes.

    form   a `documents.Form`
    start  see `encode.Start`
    """
    from mpitrain.cli.terminal.progress import bar
    from mpitrain.data.prepare.corpus import Options, prepare
    from mpitrain.data.prepare.documents import inputs as sizes
    from mpitrain.data.tokenizer import read_tokenizer

    tokenizer = read_tokenizer(name)
    options = Options(inputs, tokenizer, _separator(separator, tokenizer), form)
    total = sum(file.nbytes for file in sizes(inputs))
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
            f"{visible(str(out / file))}: {counts.documents:,} document(s), {counts.bytes:,} bytes, "
            f"{counts.tokens:,} tokens, {counts.tokens / max(1, counts.bytes):.3f} per byte"
        )
    ends = "none" if facts.separator < 0 else facts.separator
    click.echo(f"{facts.dtype}, vocabulary {facts.vocabulary:,}, separator {ends}")
    source = shlex.quote(f"data.source=tokens:{out / 'train.bin'}")
    click.echo(f"next: mpitrain launch -n 2 -- train --set {visible(source)}")


def _separator(name: str | None, tokenizer: Any) -> int:
    """Return the token behind each document; -1: none."""
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


@command.command("train-tokenizer")
@INPUTS
@click.option(
    "--vocab",
    "vocabulary",
    type=click.IntRange(258, MOST),
    required=True,
    metavar="N",
    help="Largest number of tokens.",
)
@click.option(
    "--out",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Tokenizer file to write, such as tokenizer.json.",
)
@FIELD
@MARK
def train_tokenizer(
    inputs: tuple[Path, ...], vocabulary: int, out: Path, field: str, mark: str
) -> None:
    """Train a byte-level BPE tokenizer, as GPT-2's, on text files, .jsonl or Parquet files."""
    if process.launched().rank > 0:
        return  # only rank 0 trains
    from mpitrain.cli.terminal.screen import width
    from mpitrain.data.prepare.documents import Form, texts
    from mpitrain.data.prepare.documents import inputs as sizes
    from mpitrain.data.prepare.train_tokenizer import train_tokenizer
    from mpitrain.data.tokenizer import check_tokenizers
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


@command.command()
@click.argument("file", metavar="FILE")
@click.option(
    "--rows",
    type=click.IntRange(1, MOST),
    default=4,
    show_default=True,
    help="Number of windows, spread evenly.",
)
@click.option(
    "--tokens",
    "count",
    type=click.IntRange(1, MOST),
    default=64,
    show_default=True,
    help="Tokens of a window.",
)
@click.option(
    "--tokenizer",
    "name",
    metavar="FILE|bytes",
    help="Tokenizer that decodes (default: that of mpitrain data prepare, else bytes).",
)
def show(file: str, rows: int, count: int, name: str | None) -> None:
    """Print windows of a file of tokens as text. FILE may be a pattern, as 'train_*.bin'."""
    if process.launched().rank > 0:
        return  # only rank 0 prints
    import numpy as np

    from mpitrain.cli.generate import readable
    from mpitrain.data.flat_tokens import windows
    from mpitrain.data.meta import tokenizer_beside
    from mpitrain.data.token_files import token_paths, tokens_of
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


class RankEncoder(Encoder):
    """The encoder on another rank, which has at most one chunk at a time."""

    def __init__(self, transport: Transport, rank: int):
        self._transport, self._rank, self._is_busy = transport, rank, False

    def configure(self, encoding: Encoding) -> None:
        """Send the encoding, before any pieces."""
        facts = {"separator": encoding.separator, "dtype": encoding.dtype}
        _send(self._transport, self._rank, {**facts, "nbytes": len(encoding.data)})
        self._transport.send(np.frombuffer(encoding.data, np.uint8), self._rank)

    def send(self, pieces: list[DocumentPiece]) -> None:
        _send(self._transport, self._rank, pieces)
        self._is_busy = True

    def receive(self) -> Result:
        reply = _received(self._transport, self._rank)
        self._is_busy = False
        if isinstance(reply, str):
            raise DataError(
                f"Each rank must encode its text, but rank {self._rank} could not: {reply}",
                "Remedy this, then type the same command again.",
            )
        train, held_out = (
            Encoded(self._array(part["dtype"], part["counts"]["tokens"]), Counts(**part["counts"]))
            for part in reply
        )
        return train, held_out

    def _array(self, dtype: str, count: int) -> np.ndarray:
        array = np.empty(count, dtype)
        self._transport.recv(array, self._rank)
        return array

    def close(self) -> None:
        """Receive a result that nothing needs any more, and end the loop of the rank."""
        if self._is_busy:
            reply = _received(self._transport, self._rank)
            for part in reply if isinstance(reply, list) else ():
                self._array(part["dtype"], part["counts"]["tokens"])
        _send(self._transport, self._rank, None)


class RankEncoders:
    """The encoders on all other ranks, for rank 0; their loops end at `close`."""

    def __init__(self, transport: Transport):
        self._encoders = [RankEncoder(transport, rank) for rank in range(1, transport.size)]

    @contextmanager
    def start(self, encoding: Encoding, nbytes: int) -> Iterator[Sequence[Encoder]]:
        """Send the encoding to all ranks; yield their encoders and this rank's. See `Start`."""
        for encoder in self._encoders:
            encoder.configure(encoding)
        yield [*self._encoders, LocalEncoder(encoding)]

    def close(self) -> None:
        for encoder in self._encoders:
            encoder.close()


def serve(transport: Transport) -> None:
    """Encode the chunks that rank 0 sends until it sends null: the work of any other rank."""
    tokenizer, encoding, problem = None, None, ""
    while (message := _received(transport, 0)) is not None:
        if isinstance(message, dict):
            data = np.empty(message["nbytes"], np.uint8)
            transport.recv(data, 0)
            encoding = Encoding(data.tobytes(), message["separator"], message["dtype"])
            try:
                tokenizer = open_tokenizer(encoding.data, "the tokenizer")
            except MpitrainError as error:
                problem = f"{error.law} {error.way_out}"
            continue
        results: Result | None = None
        if tokenizer and encoding:
            try:
                results = encoded_pieces(
                    encoding, tokenizer, [DocumentPiece(*piece) for piece in message]
                )
            except (MpitrainError, MemoryError, ValueError) as error:
                problem = f"{error or type(error).__name__}"
        if results is None:
            _send(transport, 0, problem)
            continue
        _send(
            transport,
            0,
            [
                {"dtype": result.tokens.dtype.name, "counts": result.counts.model_dump()}
                for result in results
            ],
        )
        for result in results:
            transport.send(result.tokens, 0)


def _send(transport: Transport, to: int, value: Any) -> None:
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    transport.send(np.array([len(data)], np.int64), to)
    transport.send(data, to)


def _received(transport: Transport, source: int) -> Any:
    length = np.empty(1, np.int64)
    transport.recv(length, source)
    data = np.empty(int(length[0]), np.uint8)
    transport.recv(data, source)
    return json.loads(data.tobytes())
