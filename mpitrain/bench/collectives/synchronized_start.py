"""What comes before a timed run: all ranks ready, and no rank ahead of the others.

Ranks leave a barrier up to a message's latency apart. Within a host that is little; between hosts it is as much as a short
all-reduce takes, and it lasts from run to run. There the ranks agree on an instant and wait for it, by clocks whose distances
they have measured.
"""

import time
from collections.abc import Callable

import numpy as np

from mpitrain.transport.base import Transport
from mpitrain.transport.clocks import Clocks

ROUNDS = 5
"""Agreements before the first that counts."""

MARGIN = 1.5
"""Time from agreement to start, over the longest time that an agreement took: so that all have heard of it by then."""


def starting_line(transport: Transport) -> Callable[[], None]:
    """A function that returns on all ranks at once; between hosts good for some seconds, as clocks drift. Collective."""
    if len(set(transport.hosts)) == 1:
        return transport.barrier
    ahead = -Clocks(transport, time.perf_counter).measure()[1]
    due = np.zeros(1)

    def agree() -> None:
        due[0] = time.perf_counter() - ahead
        transport.native_all_reduce(due, "maximum")

    longest = np.zeros(1)
    for _ in range(ROUNDS):
        transport.barrier()
        start = time.perf_counter()
        agree()
        longest[0] = max(longest[0], time.perf_counter() - start)
    transport.native_all_reduce(longest, "maximum")

    def meet() -> None:
        agree()
        start = due[0] + ahead + MARGIN * longest[0]
        while (left := start - time.perf_counter()) > 0:
            time.sleep(max(0, left - 2e-4))  # a sleep ends late; the end is awaited awake

    return meet
