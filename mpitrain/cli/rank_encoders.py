"""Encoders of `data prepare` on the ranks of an MPI job. Rank 0 also reads text and writes tokens.

A message is its length, then JSON, then perhaps arrays. Rank 0 sends each rank the encoding, then
pieces of text, and at last null. The rank answers pieces with their tokens, or with an error.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpitrain.data.documents import DocumentPiece
from mpitrain.data.prepare import Encoded, Encoder, Encoding, LocalEncoder, Result, encoded_pieces
from mpitrain.data.token_files import Counts
from mpitrain.data.tokenizer import open_tokenizer
from mpitrain.errors import DataError, MpitrainError
from mpitrain.transport.base import Transport


class RankEncoder(Encoder):
    """The encoder on another rank. At most one chunk of text is with it at a time."""

    def __init__(self, transport: Transport, rank: int):
        self._transport, self._rank, self._is_busy = transport, rank, False

    def configure(self, encoding: Encoding) -> None:
        """Send the encoding, before any text."""
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
        train, held_out = map(self._encoded, reply)
        return train, held_out

    def _encoded(self, part: dict[str, Any]) -> Encoded:
        """Receive the arrays of a part of a result."""
        tokens = np.empty(part["counts"]["tokens"], part["dtype"])
        marks = np.empty(part["marks"], np.uint8)
        self._transport.recv(tokens, self._rank)
        self._transport.recv(marks, self._rank)
        return Encoded(tokens, marks, Counts(**part["counts"]))

    def close(self) -> None:
        """Receive a result that is still on its way, and end the loop of the other rank."""
        if self._is_busy:
            reply = _received(self._transport, self._rank)
            for part in reply if isinstance(reply, list) else ():
                self._encoded(part)
        _send(self._transport, self._rank, None)


class RankEncoders:
    """For rank 0: the encoders on all other ranks. Their loops end at `close`."""

    def __init__(self, transport: Transport):
        self._encoders = [RankEncoder(transport, rank) for rank in range(1, transport.size)]

    @contextmanager
    def start(self, encoding: Encoding, nbytes: int) -> Iterator[Sequence[Encoder]]:
        """Send the encoding to all ranks; yield their encoders and one of this rank (see `Start`)."""
        for encoder in self._encoders:
            encoder.configure(encoding)
        yield [*self._encoders, LocalEncoder(encoding)]

    def close(self) -> None:
        for encoder in self._encoders:
            encoder.close()


def serve(transport: Transport) -> None:
    """On a rank other than 0: encode the text that rank 0 sends, until it sends null."""
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
                {
                    "dtype": result.tokens.dtype.name,
                    "marks": len(result.marks),
                    "counts": result.counts.model_dump(),
                }
                for result in results
            ],
        )
        for result in results:
            transport.send(result.tokens, 0)
            transport.send(result.marks, 0)


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
