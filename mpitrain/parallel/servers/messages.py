"""Messages between workers and parameter servers: a header of a few numbers, then the pieces of a flat buffer it announces."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.layers.flat import Piece, Span
from mpitrain.transport.base import Request, Transport

NUMBERS = 10
"""In a header."""


def header() -> np.ndarray:
    """An empty header: (NUMBERS,) float64 on the host, so that any rank's can be awaited whatever the device."""
    return np.zeros(NUMBERS)


def spread(flat: Any, pieces: Sequence[Piece]) -> list[Any]:
    """The pieces of a whole flat buffer, as views."""
    return [flat[piece.start : piece.stop] for piece in pieces]


def compact(flat: Any, pieces: Sequence[Piece]) -> list[Any]:
    """The same pieces in the compact buffer of the rank that owns them, as views."""
    return [flat[piece.place : piece.place + piece.stop - piece.start] for piece in pieces]


def by_span(spans: Sequence[Span], pieces: Sequence[Piece]) -> list[Piece]:
    """These pieces' parts in each span, the last span first: so gradients become complete."""
    return [
        Piece(span.start, span.stop, piece.place + span.start - piece.start)
        for span in reversed(spans)
        for piece in pieces
        if piece.start <= span.start < span.stop <= piece.stop
    ]


class PushPull:
    """Headers and pieces on one transport. Both ends name the same pieces, in the same order."""

    def __init__(self, transport: Transport):
        """Every rank makes its own, in the same order beside other claims of tags."""
        self.transport = transport
        with transport.recorder.called("a header"):
            self._headers = transport.claim_tag()
        with transport.recorder.called("parameters or gradients"):
            self._pieces = transport.claim_tag()

    def start_send(self, numbers: np.ndarray, views: Sequence[Any], to: int) -> list[Request]:
        """Begin to send a header and what it announces; none of it may change meanwhile."""
        return [
            self.transport.start_send(numbers, to, self._headers),
            *self.start_send_pieces(views, to),
        ]

    def start_send_pieces(self, views: Sequence[Any], to: int) -> list[Request]:
        """Begin to send pieces alone, to a rank that knows they come."""
        return [self.transport.start_send(view, to, self._pieces) for view in views]

    def start_recv(self, numbers: np.ndarray, views: Sequence[Any], source: int) -> list[Request]:
        """Begin to receive both from a rank."""
        return [
            self.transport.start_recv(numbers, source, self._headers),
            *self.start_recv_pieces(views, source),
        ]

    def start_recv_pieces(self, views: Sequence[Any], source: int) -> list[Request]:
        """Begin to receive pieces alone, which a header of this rank has announced, or which come in every step."""
        return [self.transport.start_recv(view, source, self._pieces) for view in views]

    def wait(self, request: Request) -> None:
        """Sleep until a message has come."""
        self.transport.wait_any([request])

    def wait_for_header(self, numbers: np.ndarray) -> int:
        """Sleep until a header of any rank has come; returns the rank."""
        request = self.transport.start_recv_any(numbers, self._headers)
        self.transport.wait_any([request])
        return request.source
