"""Slow links between ranks that are threads.

Every rank has one outgoing and one incoming link, like those of a network card, with a bandwidth
and a latency. A message occupies the sender's and the receiver's link for its bytes divided by the
bandwidth, and arrives one latency later.
"""

import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.transport.base import Request
from mpitrain.transport.threads import ThreadTransport

UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
SLOWEST, LONGEST = 1e7, 0.1
"""Bounds of a link: bit/s, and seconds of latency. With a slower one a topic would take minutes."""
NAP = 2e-4
"""Seconds between two looks at a message that is on its way."""


class Link(NamedTuple):
    """The speed of every rank's link: bytes per second, and seconds."""

    bandwidth: float
    latency: float

    def __str__(self) -> str:
        return f"{8e-6 * self.bandwidth:g} Mbit/s, {1e3 * self.latency:g} ms"


def parse_link(words: str) -> Link:
    """Return the link that `200Mbit,1ms` describes.

    raises  ConfigError if the text is not of this form, or the link is far too slow
    """
    match = re.fullmatch(r"([\d.]+)([kMG]?)bit,([\d.]+)(s|ms|us)", words.replace(" ", ""))
    try:
        if match is None:
            raise ValueError
        bits = float(match[1]) * UNITS[match[2]]
        latency = float(match[3]) * SECONDS[match[4]]
    except ValueError:
        raise ConfigError(
            f"A link is a bandwidth and a latency, such as 200Mbit,1ms, but this is {words!r}.",
            "Write numbers with kbit, Mbit or Gbit, and us, ms or s.",
        ) from None
    if not (bits >= SLOWEST and latency <= LONGEST):
        raise ConfigError(
            f"A link has at least {SLOWEST / 1e6:g} Mbit/s and at most {1e3 * LONGEST:g} ms of latency, but this is {words!r}.",
            "Choose a faster link.",
        )
    return Link(bits / 8, latency)


class Network:
    def __init__(self, link: Link):
        self._link, self._lock = link, threading.Lock()
        self._free: dict[tuple[str, int], float] = defaultdict(float)
        self._arrivals: dict[tuple, deque[float]] = defaultdict(deque)
        self._last_arrival = 0.0

    def sent(self, key: tuple, source: int, target: int, nbytes: int) -> float:
        """Reserve the links of a message; return the time at which the sender is free."""
        with self._lock:
            out, into = ("out", source), ("in", target)
            begin = max(time.perf_counter(), self._free[out], self._free[into])
            self._free[out] = self._free[into] = end = begin + nbytes / self._link.bandwidth
            arrival = end + self._link.latency
            self._arrivals[key].append(arrival)
            self._last_arrival = max(self._last_arrival, arrival)
            return end

    def arrival(self, key: tuple) -> float:
        with self._lock:
            arrivals = self._arrivals[key]
            return arrivals.popleft() if arrivals else 0.0

    @property
    def is_busy(self) -> bool:
        return time.perf_counter() < self._last_arrival


class SlowTransport(ThreadTransport):
    """A rank that is a thread, with messages at the speed of the network's links."""

    def __init__(self, rank: ThreadTransport, network: Network):
        """Take the place of the transport `rank`."""
        vars(self).update(vars(rank))
        self._network = network

    def start_send(self, array: np.ndarray, to: int, tag: int = 0) -> Any:
        source, target = self.members[self.rank], self.members[to]
        # The receiver may ask for the arrival as soon as the inner transport has the message.
        free = self._network.sent((self.context, source, target, tag), source, target, array.nbytes)
        return _Timed(super().start_send(array, to, tag), lambda _: free)

    def start_recv(self, array: np.ndarray, source: int | None, tag: int = 0) -> Any:
        request: Any = super().start_recv(array, source, tag)
        target = self.members[self.rank]

        def due(received: Request) -> float:
            sender = received.source if source is None else source
            return self._network.arrival((self.context, self.members[sender], target, tag))

        return _Timed(request, due)

    def wait_until(self, done: Callable[[], bool], pause: float = 1e-6, what: Any = None) -> None:
        # The inner transport takes a rank that waits for a slow message for one in a deadlock.
        while not done():
            if self._network.is_busy:
                time.sleep(NAP)
            else:
                super().wait_until(lambda: self._network.is_busy or done(), pause, what)


class _Timed:
    """A request that is not complete before a given time."""

    def __init__(self, inner: Request, due: Callable[[Request], float]):
        self._inner, self._due, self._time = inner, due, -1.0

    @property
    def source(self) -> int:
        return self._inner.source

    def _is_met(self) -> None:
        if self._time < 0:
            self._time = self._due(self._inner)

    def test(self) -> bool:
        if not self._inner.test():
            return False
        self._is_met()
        return time.perf_counter() >= self._time

    def wait(self) -> None:
        self._inner.wait()
        self._is_met()
        time.sleep(max(0.0, self._time - time.perf_counter()))

    def __str__(self) -> str:
        return str(self._inner)
