"""`prepare` encodes input files into a directory of tokens, and continues after an interruption."""

import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import numpy as np
from pydantic import BaseModel

from mpitrain.data.conversations import Recognised
from mpitrain.data.documents import Chunk, DocumentPiece, Form, Input, chunks, inputs
from mpitrain.data.instructions import encoded as encoded_conversation
from mpitrain.data.records import Position
from mpitrain.data.token_files import META, Count, Counts, Prepared, mark_path, prepared
from mpitrain.data.tokenizer import TOKENIZER, Tokenizer, digest, open_tokenizer
from mpitrain.errors import ConfigError, DataError
from mpitrain.files import (
    appending,
    cannot_write,
    contents,
    created,
    open_folder,
    rename,
    whole,
    write_whole,
)
from mpitrain.strict_json import validated

TRAIN, HELD_OUT = "train.bin", "val.bin"
PARTIAL = ".partial"
JOURNAL = ".prepare.json"
LARGE_WORK = 8 << 20
"""Bytes of input above which several processes are worth the time of their start."""
EVERY = 4
"""Chunks between two entries of the journal: an interruption loses at most this work."""


class Encoded(NamedTuple):
    """The tokens of some pieces.

    marks  of conversations, (tokens,) uint8; of other documents empty
    """

    tokens: np.ndarray
    marks: np.ndarray
    counts: Counts


class Encoding(NamedTuple):
    """How text becomes tokens.

    data       content of the tokenizer's file
    separator  the token behind each document; -1: none
    """

    data: bytes
    separator: int
    dtype: str


Result = tuple[Encoded, Encoded]
"""The tokens of one chunk: those to train on, and those held out."""


class Encoder(Protocol):
    """A process or rank that encodes one chunk at a time."""

    def send(self, pieces: list[DocumentPiece]) -> None:
        """Send the pieces of a chunk to encode; the previous result must have been received."""

    def receive(self) -> Result:
        """Wait for the tokens of the chunk, and return them; DataError if the encoder failed or
        ended.
        """


Start = Callable[[Encoding, int], AbstractContextManager[Sequence[Encoder]]]
"""(encoding, bytes of the text) -> context with one encoder or more, which ends them."""


def encoded(chunks: Iterable[Chunk], encoders: Sequence[Encoder]) -> Iterator[tuple[Chunk, Result]]:
    """Yield each chunk with its tokens, in order; the result does not depend on the encoders.

    Of n encoders, number k mod n encodes chunk k. An encoder has one chunk at a time.
    """
    waiting: list[Chunk | None] = [None] * len(encoders)
    number = 0
    for number, chunk in enumerate(chunks, 1):
        at = (number - 1) % len(encoders)
        if previous := waiting[at]:
            yield previous, encoders[at].receive()
        encoders[at].send(chunk.pieces)
        waiting[at] = chunk
    for at in range(number, number + len(encoders)):
        if last := waiting[at % len(encoders)]:
            yield last, encoders[at % len(encoders)].receive()


def encoded_pieces(encoding: Encoding, tokenizer: Tokenizer, pieces: list[DocumentPiece]) -> Result:
    train, held_out = (
        _encoded(encoding, tokenizer, [piece for piece in pieces if piece.held_out is wanted])
        for wanted in (False, True)
    )
    return train, held_out


def _encoded(encoding: Encoding, tokenizer: Tokenizer, pieces: list[DocumentPiece]) -> Encoded:
    end = np.array([encoding.separator] if encoding.separator >= 0 else [], encoding.dtype)
    arrays, marks, nbytes = [np.empty(0, encoding.dtype)], [np.empty(0, np.uint8)], 0
    for piece in pieces:
        nbytes += len(piece.text.encode())
        if piece.row:
            tokens, mark = encoded_conversation(tokenizer, piece.row)
            arrays.append(tokens.astype(encoding.dtype))
            marks.append(mark)
            continue
        arrays.append(tokenizer.encode(piece.text).astype(encoding.dtype))
        if piece.ends:
            arrays.append(end)
    tokens = np.concatenate(arrays)
    documents = sum(piece.ends for piece in pieces)
    return Encoded(
        tokens, np.concatenate(marks), Counts(documents=documents, tokens=len(tokens), bytes=nbytes)
    )


class LocalEncoder(Encoder):
    """An encoder in this process. It encodes in `receive`, while other encoders encode, too."""

    def __init__(self, encoding: Encoding):
        self._encoding = encoding
        self._tokenizer = open_tokenizer(encoding.data, "the tokenizer")
        self._pieces: list[DocumentPiece] = []

    def send(self, pieces: list[DocumentPiece]) -> None:
        self._pieces = pieces

    def receive(self) -> Result:
        return encoded_pieces(self._encoding, self._tokenizer, self._pieces)


class ProcessEncoder(Encoder):
    """An encoder in a process of its own, which ends when the connection to its parent closes."""

    def __init__(self, encoding: Encoding):
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, encoding), daemon=True).start()
        theirs.close()

    def send(self, pieces: list[DocumentPiece]) -> None:
        with suppress(BrokenPipeError):  # `receive` says so.
            self._link.send(pieces)

    def receive(self) -> Result:
        try:
            result = self._link.recv()
        except (EOFError, ConnectionResetError):
            raise DataError(
                "Each process must encode its text, but one has ended.",
                "Free memory or lower --workers, then type the same command again.",
            ) from None
        if isinstance(result, Exception):
            raise result
        return cast(Result, result)

    def close(self) -> None:
        self._link.close()


def processes(workers: int, least: int = LARGE_WORK) -> Start:
    """Return a `Start` of `workers` processes.

    With one worker, or for at most `least` bytes of text, this process encodes.
    """

    @contextmanager
    def start(encoding: Encoding, nbytes: int) -> Iterator[Sequence[Encoder]]:
        if workers == 1 or nbytes <= least:
            yield [LocalEncoder(encoding)]
            return
        with ExitStack() as ended:
            encoders = []
            for _ in range(workers):
                encoders.append(ProcessEncoder(encoding))
                ended.callback(encoders[-1].close)
            yield encoders

    return start


def _serve(link: Connection, encoding: Encoding) -> None:
    """Run a `ProcessEncoder`'s process: encode chunks until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
    with closing(link), suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            tokenizer = open_tokenizer(encoding.data, "the tokenizer")
            while True:
                link.send(encoded_pieces(encoding, tokenizer, link.recv()))
        except (DataError, MemoryError, ValueError) as error:
            link.send(error)


class Options(NamedTuple):
    """The options of `prepare`. It continues only an interrupted call with the same options.

    separator   the token behind each document; -1: none
    recognised  of conversations, notes what they are
    """

    paths: Sequence[Path]
    tokenizer: Tokenizer
    separator: int
    form: Form
    recognised: Recognised | None = None


class Journal(BaseModel):
    """The progress of an interrupted `prepare`.

    configuration      SHA-256 of the inputs and options
    input              number of the input file that is next, or partly read
    offset, documents  the `Position` in this file
    train, held_out    the tokens written so far
    """

    configuration: str
    input: Count = 0
    offset: Count = 0
    documents: Count = 0
    train: Counts = Counts()
    held_out: Counts = Counts()


def prepare(
    options: Options,
    out: Path,
    start: Start,
    progress: Callable[[int], None] = lambda nbytes: None,
    every: int = EVERY,
) -> Prepared:
    """Write train.bin, val.bin, tokenizer.json and meta.json into the directory `out`.

    No file has its final name before it is complete, and train.bin gets its name last. After an
    interruption the same call continues. A directory that is complete stays as it is.

    start     starts the processes or ranks that encode
    progress  called with the number of input bytes so far
    every     chunks between two entries of the journal
    raises    DataError for inputs; ConfigError if `out` has other data or cannot be written
    """
    files = inputs(options.paths)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out):
            return _Writer(options, files, out, progress, every).run(start)
    except OSError as error:
        raise cannot_write(f"The directory {out}", error) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open_folder(folder) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Another process prepares data in {folder}.", "Wait for it, or stop it."
            ) from None
        except OSError:  # Some file systems of clusters have no locks.
            pass
        yield


def _configuration(options: Options, files: Sequence[Input]) -> str:
    facts = [
        [[str(file.path.resolve()), file.nbytes, file.path.stat().st_mtime_ns] for file in files],
        digest(options.tokenizer.data),
        options.separator,
        options.form,
    ]
    return hashlib.sha256(json.dumps(facts).encode(errors="surrogateescape")).hexdigest()


class _Writer:
    """One call of `prepare`."""

    def __init__(
        self,
        options: Options,
        files: Sequence[Input],
        folder: Path,
        progress: Callable[[int], None],
        every: int,
    ):
        self._options, self._inputs, self._folder = options, files, folder
        self._progress, self._every = progress, every
        self._dtype = "uint16" if options.tokenizer.vocabulary <= 1 << 16 else "uint32"
        self._configuration = _configuration(options, files)

    def run(self, start: Start) -> Prepared:
        if done := self._finished():
            (self._folder / JOURNAL).unlink(missing_ok=True)
            return done
        journal = self._resumed() or self._begun()
        if journal.input < len(self._inputs):
            journal = self._encode(journal, start)
        return self._finish(journal)

    def _finished(self) -> Prepared | None:
        """Return the facts of complete data; ConfigError if the directory has other data."""
        if not os.path.lexists(self._folder / TRAIN):
            return None
        done = prepared(self._folder / TRAIN)
        if done is None or done.configuration != self._configuration:
            raise self._taken(TRAIN)
        return done

    def _taken(self, name: str) -> ConfigError:
        return ConfigError(
            f"{self._folder} already has another {name}.",
            "Choose another --out, or remove that file.",
        )

    def _resumed(self) -> Journal | None:
        try:
            journal = validated(Journal, contents(self._folder / JOURNAL))
        except (OSError, ValueError):
            return None
        if journal.configuration != self._configuration or journal.input > len(self._inputs):
            return None
        is_complete = journal.input == len(self._inputs)
        for name, nbytes in self._sizes(journal):
            partial = self._folder / (name + PARTIAL)
            if not is_complete and (not partial.exists() or partial.stat().st_size < nbytes):
                return None
        return journal

    def _begun(self) -> Journal:
        for name in (HELD_OUT, META):
            if os.path.lexists(self._folder / name):
                raise self._taken(name)
        with suppress(FileNotFoundError):
            if contents(self._folder / TOKENIZER) != self._options.tokenizer.data:
                raise self._taken(TOKENIZER)
        (self._folder / JOURNAL).unlink(missing_ok=True)
        journal = Journal(configuration=self._configuration)
        for name, _ in self._sizes(journal):
            os.close(created(self._folder / (name + PARTIAL)))
        return journal

    @staticmethod
    def _files(journal: Journal) -> list[tuple[str, Counts]]:
        return [(TRAIN, journal.train), (HELD_OUT, journal.held_out)]

    def _sizes(self, journal: Journal) -> list[tuple[str, int]]:
        """Return (name, bytes) of the files that are written in order: tokens, then marks."""
        itemsize = np.dtype(self._dtype).itemsize
        files = self._files(journal)
        sizes = [(name, counts.tokens * itemsize) for name, counts in files]
        if self._options.form.template:
            sizes += [(mark_path(Path(name)).name, counts.tokens) for name, counts in files]
        return sizes

    def _encode(self, journal: Journal, start: Start) -> Journal:
        """Encode the inputs from the journal's position on, and append to the tokens it counts."""
        files = []
        try:
            for name, nbytes in self._sizes(journal):
                files.append(appending(self._folder / (name + PARTIAL)))
                os.ftruncate(files[-1], nbytes)
            options = self._options
            encoding = Encoding(options.tokenizer.data, options.separator, self._dtype)
            rest = sum(source.nbytes for source in self._inputs[journal.input :]) - journal.offset
            turns: list[int] = []
            with start(encoding, rest) as encoders:
                work = encoded(self._chunks(journal, turns), encoders)
                for count, (chunk, results) in enumerate(work, 1):
                    arrays = [*(one.tokens for one in results), *(one.marks for one in results)]
                    for file, array in zip(files, arrays, strict=False):
                        _write(file, array)
                    journal = self._after(
                        journal, turns.pop(0), chunk, *(r.counts for r in results)
                    )
                    self._progress(
                        sum(source.nbytes for source in self._inputs[: journal.input])
                        + journal.offset
                    )
                    if count % self._every == 0:
                        self._note(journal, files)
            journal = journal.model_copy(update={"input": len(self._inputs), "offset": 0})
            for key, where in (("train", "to train on"), ("held_out", "for validation")):
                if not getattr(journal, key).tokens and (key == "train" or options.form.fraction):
                    raise DataError(
                        f"The inputs must have text {where}, but there is none.",
                        "Name more text, or change --validation-fraction.",
                    )
            self._note(journal, files)
        finally:
            for file in files:
                os.close(file)
        return journal

    def _chunks(self, journal: Journal, turns: list[int]) -> Iterator[Chunk]:
        """Yield the chunks from the journal's position on; append each one's input file to `turns`."""
        for source in self._inputs[journal.input :]:
            is_begun = source.number == journal.input
            start = Position(journal.offset, journal.documents) if is_begun else Position()
            for chunk in chunks(source, self._options.form, start, self._options.recognised):
                turns.append(source.number)
                yield chunk

    @staticmethod
    def _after(
        journal: Journal, number: int, chunk: Chunk, train: Counts, held_out: Counts
    ) -> Journal:
        return Journal(
            configuration=journal.configuration,
            input=number,
            offset=chunk.end.offset,
            documents=chunk.end.documents,
            train=journal.train.added(*train.model_dump().values()),
            held_out=journal.held_out.added(*held_out.model_dump().values()),
        )

    def _note(self, journal: Journal, files: Sequence[int]) -> None:
        """Sync the files of tokens, then write the journal that counts these tokens."""
        for file in files:
            os.fsync(file)
        write_whole(self._folder / JOURNAL, journal.model_dump_json())

    def _finish(self, journal: Journal) -> Prepared:
        """Give all files their final names. After an interruption this function can run again."""
        tokenizer, folder = self._options.tokenizer, self._folder
        has_held_out = journal.held_out.tokens > 0
        facts = Prepared(
            dtype="uint32" if self._dtype == "uint32" else "uint16",
            vocabulary=tokenizer.vocabulary,
            separator=self._options.separator,
            tokenizer=digest(tokenizer.data),
            files=dict(self._files(journal)[: 1 + has_held_out]),
            configuration=self._configuration,
            template=self._options.form.template,
        )
        with whole(folder / TOKENIZER) as file:
            file.write(tokenizer.data)
        for name, nbytes in self._sizes(journal):
            if name != TRAIN and nbytes and (folder / (name + PARTIAL)).exists():
                rename(folder / (name + PARTIAL), folder / name)
        write_whole(folder / META, facts.model_dump_json(indent=1) + "\n")
        rename(folder / (TRAIN + PARTIAL), folder / TRAIN)
        for name in (*(name + PARTIAL for name, _ in self._sizes(journal)), JOURNAL):
            (folder / name).unlink(missing_ok=True)
        return facts


def _write(file: int, tokens: np.ndarray) -> None:
    rest = memoryview(tokens.tobytes())
    while rest:
        rest = rest[os.write(file, rest) :]
