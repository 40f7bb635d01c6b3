"""What the clocks of hosts differ by, measured with messages."""

from collections.abc import Callable

import numpy as np

from mpitrain.transport.base import Transport

ROUNDS = 16
"""Questions about the time that each host asks; the answer that took the shortest way counts."""


class Clocks:
    """The clocks of all ranks. One clock serves all ranks of a host, and is asked for by the first of them."""

    def __init__(self, transport: Transport, clock: Callable[[], float]):
        """clock: seconds, of this rank. Collective."""
        self._transport, self._clock = transport, clock
        with transport.recorder.called("the clocks"):
            self._tag = transport.claim_tag()
        hosts = transport.hosts
        self._asks = hosts.index(hosts[transport.rank])  # for this rank
        self._asking = [rank for rank, host in enumerate(hosts) if 0 < rank == hosts.index(host)]

    def measure(self) -> tuple[float, float]:
        """A time of this rank's clock, and the seconds to add to it to get that of rank 0; collective.

        The first rank of each other host asks rank 0 what time it is, and takes the answer for that of half the way: wrong by
        half the shortest way there and back at most. Clocks drift: who measures twice knows how fast. One host sends nothing.
        source  Cristian 1989, Probabilistic clock synchronization, Distributed Computing 3
        """
        transport, now, found = self._transport, np.zeros(1), (self._clock(), 0.0)
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
                        shortest, found = answered - asked, (half, float(now[0]) - half)
        if not self._asking:
            return found
        time, offset = transport.gather_text(found)[self._asks]
        return time, offset
