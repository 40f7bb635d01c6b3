"""A transport decorator that does not send one message."""

import numpy as np

from mpitrain.transport.base import Transport
from mpitrain.transport.forwarding import Forwarding
from mpitrain.transport.requests import Request


class Losing(Forwarding):
    """A Transport that drops one message: the first send after `is_armed` becomes True.

    The sender sees a complete request. Transports split from it drop the message, too.
    """

    def __init__(self, inner: Transport, root: "Losing | None" = None):
        super().__init__(inner)
        self._root = root or self
        self.is_armed = False

    def over(self, inner: Transport) -> "Losing":
        return Losing(inner, self._root)

    def start_send(self, array: np.ndarray, to: int, tag: int = 0) -> Request:
        if not self._root.is_armed:
            return super().start_send(array, to, tag)
        self._root.is_armed = False
        return _Complete()


class _Complete:
    """A request that is complete from the beginning."""

    source = -1

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        pass
