"""A synchronized start of timed runs: all ranks are ready, and all start at the same time.

Ranks leave a barrier up to a message's latency apart. Within a host that is little. Between hosts
it is as long as a short all-reduce, and the same ranks are late in every run. There the ranks agree
on a start time and wait for it, by clocks with measured offsets.
"""

import time
from collections.abc import Callable

import numpy as np

from mpitrain.transport.base import Transport
from mpitrain.transport.clocks import Clocks

ROUNDS = 5
"""Number of agreements on a start time that are timed, to find the longest one."""

MARGIN = 1.5
"""Factor on the longest agreement, which gives the delay from an agreement to the start.

After this delay all ranks know the start time.
"""


def starting_line(transport: Transport) -> Callable[[], None]:
    """Return a function that returns on all ranks at the same time. Collective.

    Between hosts it is accurate for some seconds only, because clocks drift.
    """
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
            time.sleep(max(0, left - 2e-4))  # sleep returns late, so the last 0.2 ms are spun

    return meet
