"""The seconds that a rank waits for messages, as a recorder of a traced transport."""

import threading
import time
from collections.abc import Callable

from mpitrain.trace.recorder import Silent


class Waits(Silent):
    """A recorder that sums the waits of one rank: the idle time of its pipeline stage, too.

    Waits within a wait, and waits of other threads, do not count.

    seconds  of all waits so far
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        super().__init__()
        self.seconds, self.clock = 0.0, clock
        self._owner, self._began = threading.get_ident(), 0.0
        self._is_waiting = False

    def wait(self, *fields: int, **more: int) -> int:
        if self._is_waiting or threading.get_ident() != self._owner:
            return 0
        self._is_waiting, self._began = True, self.clock()
        return 1

    def go_on(self, wait: int) -> None:
        if wait:
            self._is_waiting = False
            self.seconds += self.clock() - self._began
