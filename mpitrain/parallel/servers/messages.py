"""The push and pull messages of parameter servers: a header of a few numbers, then pieces of a flat
buffer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.layers.flat import Span
from mpitrain.regions import Piece
from mpitrain.transport.base import Request, Transport

NUMBERS = 10
"""The number of numbers in a header."""


def header() -> np.ndarray:
    """Return an empty header, (NUMBERS,) float64. It is in host memory, so a rank can wait for any
    sender.
    """
    return np.zeros(NUMBERS)


def by_span(spans: Sequence[Span], pieces: Sequence[Piece]) -> list[Piece]:
    """Split pieces at the boundaries of spans, into one piece per span.

    The last span is first: gradients become complete in this order.
    """
    return [
        Piece(span.start, span.stop, piece.offset + span.start - piece.start)
        for span in reversed(spans)
        for piece in pieces
        if piece.start <= span.start < span.stop <= piece.stop
    ]


class PushPull:
    """Messages between workers and servers on one transport: a header, then the pieces that it
    announces.

    Sender and receiver pass the same pieces in the same order.
    """

    def __init__(self, transport: Transport):
        """Claim two tags. All ranks must claim tags in the same order."""
        self.transport = transport
        with transport.recorder.called("a header"):
            self._headers = transport.claim_tag()
        with transport.recorder.called("parameters or gradients"):
            self._pieces = transport.claim_tag()

    def start_send(self, numbers: np.ndarray, views: Sequence[Any], to: int) -> list[Request]:
        """Start to send a header and its pieces. The caller must not change them until the requests
        end.
        """
        return [
            self.transport.start_send(numbers, to, self._headers),
            *self.start_send_pieces(views, to),
        ]

    def start_send_pieces(self, views: Sequence[Any], to: int) -> list[Request]:
        """Start to send pieces without a header, to a rank that expects them."""
        return [self.transport.start_send(view, to, self._pieces) for view in views]

    def start_recv(self, numbers: np.ndarray, views: Sequence[Any], source: int) -> list[Request]:
        """Start to receive a header and its pieces from a rank."""
        return [
            self.transport.start_recv(numbers, source, self._headers),
            *self.start_recv_pieces(views, source),
        ]

    def start_recv_pieces(self, views: Sequence[Any], source: int) -> list[Request]:
        """Start to receive pieces that an earlier header has announced, or that arrive in every
        step.
        """
        return [self.transport.start_recv(view, source, self._pieces) for view in views]

    def wait(self, request: Request) -> None:
        """Sleep until a message has arrived."""
        self.transport.wait_any([request])

    def wait_for_header(self, numbers: np.ndarray) -> int:
        """Sleep until a header of any rank has arrived, and return that rank."""
        request = self.transport.start_recv_any(numbers, self._headers)
        self.transport.wait_any([request])
        return request.source
