"""Encoding of chunks of text: in this process, or in processes or ranks that take turns."""

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol, cast

import numpy as np

from mpitrain.data.meta import Counts
from mpitrain.data.prepare.documents import Chunk, DocumentPiece
from mpitrain.data.tokenizer import Tokenizer, open_tokenizer
from mpitrain.errors import DataError

LARGE_WORK = 8 << 20
"""Bytes of input from which on several processes are worth their start."""


class Encoded(NamedTuple):
    """The tokens of a chunk for one file, (N,), and their counts."""

    tokens: np.ndarray
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
"""The tokens of a chunk to train on, and those held out."""


class Encoder(Protocol):
    """A process or rank that encodes one chunk at a time."""

    def send(self, pieces: list[DocumentPiece]) -> None:
        """Send the pieces of a chunk, after the result of the previous chunk is received."""

    def receive(self) -> Result:
        """Return the tokens of the chunk; raise DataError if the encoder failed or has ended."""


Start = Callable[[Encoding, int], AbstractContextManager[Sequence[Encoder]]]
"""Starts one encoder or more for a text: (encoding, bytes of the text) -> context with the
encoders.
"""


def encoded(chunks: Iterable[Chunk], encoders: Sequence[Encoder]) -> Iterator[tuple[Chunk, Result]]:
    """Yield each chunk with its tokens, in order; the result does not depend on the encoders.

    Chunk k goes to encoder k mod their number, each one chunk at a time.
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
    """Return the tokens of the pieces of a chunk."""
    train, held_out = (
        _encoded(encoding, tokenizer, [piece for piece in pieces if piece.held_out is wanted])
        for wanted in (False, True)
    )
    return train, held_out


def _encoded(encoding: Encoding, tokenizer: Tokenizer, pieces: list[DocumentPiece]) -> Encoded:
    end = np.array([encoding.separator] if encoding.separator >= 0 else [], encoding.dtype)
    arrays, nbytes = [np.empty(0, encoding.dtype)], 0
    for piece in pieces:
        arrays.append(tokenizer.encode(piece.text).astype(encoding.dtype))
        nbytes += len(piece.text.encode())
        if piece.ends:
            arrays.append(end)
    tokens = np.concatenate(arrays)
    documents = sum(piece.ends for piece in pieces)
    return Encoded(tokens, Counts(documents=documents, tokens=len(tokens), bytes=nbytes))


class LocalEncoder(Encoder):
    """The encoder in this process. It works in `receive`, while other encoders work, too."""

    def __init__(self, encoding: Encoding):
        self._encoding = encoding
        self._tokenizer = open_tokenizer(encoding.data, "the tokenizer")
        self._pieces: list[DocumentPiece] = []

    def send(self, pieces: list[DocumentPiece]) -> None:
        self._pieces = pieces

    def receive(self) -> Result:
        return encoded_pieces(self._encoding, self._tokenizer, self._pieces)


class ProcessEncoder(Encoder):
    """An encoder in a process, which ends when its connection closes: none survives its parent."""

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
        """End the process."""
        self._link.close()


def processes(workers: int, least: int = LARGE_WORK) -> Start:
    """Return a start of so many processes; for one, or at most `least` bytes, of this process."""

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
    """Encode chunks until the connection closes: the work of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
    with closing(link), suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            tokenizer = open_tokenizer(encoding.data, "the tokenizer")
            while True:
                link.send(encoded_pieces(encoding, tokenizer, link.recv()))
        except (DataError, MemoryError, ValueError) as error:
            link.send(error)
