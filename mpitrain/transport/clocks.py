"""The offsets between the clocks of hosts, measured with messages."""

from collections.abc import Callable

import numpy as np

from mpitrain.transport.base import Transport

ROUNDS = 16
"""Round trips that each host makes to rank 0; the fastest one gives the offset."""


class Clocks:
    """The clock offsets of all ranks. The ranks of one host share one clock, which its first rank
    measures.
    """

    def __init__(self, transport: Transport, clock: Callable[[], float]):
        """Claim the tag of the measurement. Collective.

        clock  returns seconds, of this rank
        """
        self._transport, self._clock = transport, clock
        with transport.recorder.called("the clocks"):
            self._tag = transport.claim_tag()
        hosts = transport.hosts
        # this index is the rank that measures for this rank
        self._asks = hosts.index(hosts[transport.rank])
        self._asking = [rank for rank, host in enumerate(hosts) if 0 < rank == hosts.index(host)]

    def measure(self) -> tuple[float, float]:
        """Return a time of this rank's clock, and the seconds that rank 0's clock is ahead of it.
        Collective.

        The first rank of each other host sends rank 0 a message and gets rank 0's time back. It
        takes this time for the middle of the round trip. The error is at most half of the shortest
        round trip. Clocks drift: two measurements give the rate. On a single host no message is
        sent.

        source  Cristian 1989, Probabilistic clock synchronization, Distributed Computing 3
        """
        transport, now, measurement = self._transport, np.zeros(1), (self._clock(), 0.0)
        for asking in self._asking:
            shortest = float("inf")
            for _ in range(ROUNDS):
                if transport.rank == 0:
                    transport.recv(now, asking, self._tag)
                    now[0] = self._clock()
                    transport.send(now, asking, self._tag)
                elif transport.rank == asking:
                    asked = self._clock()
                    transport.send(now, 0, self._tag)
                    transport.recv(now, 0, self._tag)
                    answered = self._clock()
                    if answered - asked < shortest:
                        half = (asked + answered) / 2
                        shortest, measurement = answered - asked, (half, float(now[0]) - half)
        if not self._asking:
            return measurement
        time, offset = transport.gather_text(measurement)[self._asks]
        return time, offset
