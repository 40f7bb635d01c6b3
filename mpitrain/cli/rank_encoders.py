"""Encoders of `data prepare` on the ranks of an MPI job. Rank 0 also reads text and writes tokens.

Rank 0 sends each rank the encoding, then pieces of text, and at last None. The rank answers pieces
with their tokens, or with what went wrong.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mpitrain.data.documents import DocumentPiece
from mpitrain.data.prepare import Encoder, Encoding, LocalEncoder, Result, encoded_pieces
from mpitrain.data.tokenizer import open_tokenizer
from mpitrain.errors import DataError, MpitrainError
from mpitrain.transport.base import Transport
from mpitrain.transport.objects import recv_object, send_object


class RankEncoder(Encoder):
    """The encoder on another rank. At most one chunk of text is with it at a time."""

    def __init__(self, transport: Transport, rank: int):
        self._transport, self._rank, self._is_busy = transport, rank, False

    def configure(self, encoding: Encoding) -> None:
        """Send the encoding, before any text."""
        send_object(self._transport, encoding, self._rank)

    def send(self, pieces: list[DocumentPiece]) -> None:
        send_object(self._transport, pieces, self._rank)
        self._is_busy = True

    def receive(self) -> Result:
        reply = recv_object(self._transport, self._rank)
        self._is_busy = False
        if isinstance(reply, str):
            raise DataError(
                f"Each rank must encode its text, but rank {self._rank} could not: {reply}",
                "Remedy this, then type the same command again.",
            )
        return reply

    def close(self) -> None:
        """Receive a result that is still on its way, and end the loop of the other rank."""
        if self._is_busy:
            recv_object(self._transport, self._rank)
        send_object(self._transport, None, self._rank)


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
    """On a rank other than 0: encode the text that rank 0 sends, until it sends None."""
    tokenizer, encoding, problem = None, None, ""
    while (message := recv_object(transport, 0)) is not None:
        if isinstance(message, Encoding):
            encoding = message
            try:
                tokenizer = open_tokenizer(encoding.data, "the tokenizer")
            except MpitrainError as error:
                problem = f"{error.law} {error.way_out}"
            continue
        reply: Result | str = problem
        if tokenizer and encoding:
            try:
                reply = encoded_pieces(encoding, tokenizer, message)
            except (MpitrainError, MemoryError, ValueError) as error:
                reply = problem = f"{error or type(error).__name__}"
        send_object(transport, reply, 0)
