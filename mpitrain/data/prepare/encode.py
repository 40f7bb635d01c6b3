"""Encoding of chunks of text: in this process, or in several that take turns."""

import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from mpitrain.data.meta import Counts
from mpitrain.data.prepare.documents import Chunk, Piece
from mpitrain.data.tokenizer import Tokenizer, open_tokenizer
from mpitrain.errors import DataError


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


def encoded(
    encoding: Encoding, found: Iterable[Chunk], workers: int
) -> Iterator[tuple[Chunk, Result]]:
    """Yield each chunk with its tokens, in order; the result does not depend on `workers`."""
    if workers > 1:
        yield from _by_workers(encoding, found, workers)
        return
    tokenizer = open_tokenizer(encoding.data, "the tokenizer")
    for chunk in found:
        yield chunk, _result(encoding, tokenizer, chunk.pieces)


def _result(encoding: Encoding, tokenizer: Tokenizer, pieces: list[Piece]) -> Result:
    train, held_out = (
        _encoded(encoding, tokenizer, [piece for piece in pieces if piece.held_out is wanted])
        for wanted in (False, True)
    )
    return train, held_out


def _encoded(encoding: Encoding, tokenizer: Tokenizer, pieces: list[Piece]) -> Encoded:
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


def _by_workers(
    encoding: Encoding, found: Iterable[Chunk], workers: int
) -> Iterator[tuple[Chunk, Result]]:
    """Give chunk k to process k mod workers, each one chunk at a time.

    A process ends when its connection closes, so none survives a killed parent.
    """
    context = multiprocessing.get_context("spawn")
    links: list[Connection] = []
    waiting: list[Chunk | None] = [None] * workers
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            links.append(ours)
            context.Process(target=_serve, args=(theirs, encoding), daemon=True).start()
            theirs.close()
        number = 0
        for number, chunk in enumerate(found, 1):
            at = (number - 1) % workers
            if previous := waiting[at]:
                yield previous, _received(links[at])
            links[at].send(chunk.pieces)
            waiting[at] = chunk
        for at in range(number, number + workers):
            if last := waiting[at % workers]:
                yield last, _received(links[at % workers])
    finally:
        for link in links:
            link.close()


def _received(link: Connection) -> Result:
    try:
        found = link.recv()
    except EOFError:
        raise DataError(
            "Each process must encode its text, but one has ended.",
            "Free memory or lower --workers, then type the same command again.",
        ) from None
    if isinstance(found, Exception):
        raise found
    return found


def _serve(link: Connection, encoding: Encoding) -> None:
    """Encode chunks until the connection closes: the work of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
    with closing(link), suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            tokenizer = open_tokenizer(encoding.data, "the tokenizer")
            while True:
                link.send(_result(encoding, tokenizer, link.recv()))
        except (DataError, MemoryError, ValueError) as error:
            link.send(error)
