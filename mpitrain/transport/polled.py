"""A transport whose messages progress only while its rank polls."""

from mpitrain.transport.base import Transport
from mpitrain.transport.forwarding import Forwarding


class Polled(Forwarding):
    """A Transport that admits no second thread, nor do the transports split from it."""

    def __init__(self, inner: Transport):
        super().__init__(inner)
        self.admits_threads = False

    def over(self, inner: Transport) -> "Polled":
        return Polled(inner)
