"""The progress engine of non-blocking reductions: polled between layers, or a background thread."""

import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from mpitrain.collectives.engine.executor import Reduction
from mpitrain.errors import CommError, MpitrainError
from mpitrain.transport.base import Transport

PAUSE = 2e-4
"""Shortest pause between two rounds of polls, in seconds: a round may take the lock from the main thread."""

TURN = 2e-4
"""Seconds after which Python passes the interpreter lock to a thread that waits for it.

Python's default of 5 ms leaves links idle whenever the main thread is between two long operations.
"""


class ProgressEngine(Protocol):
    """Progress engine: drives the reductions of one transport from their start to their end.

    One thread calls it, in the same order on all ranks.
    """

    def start(self, reduction: Reduction) -> None:
        """Start the reduction, and drive it from now on."""

    def poll(self) -> None:
        """Progress all started reductions without blocking."""

    def wait(self, reduction: Reduction | None = None) -> None:
        """Block until `reduction` has ended, or all started ones if None.

        All started reductions progress meanwhile.
        """

    def leave(self) -> None:
        """Stop driving the started reductions; the caller waits for each of them itself."""


class PolledProgress:
    """Progress engine that works only while the caller is inside its methods."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._started: list[Reduction] = []

    def start(self, reduction: Reduction) -> None:
        reduction.start()
        self._started.append(reduction)

    def poll(self) -> None:
        for reduction in self._started:
            reduction.poll()

    def wait(self, reduction: Reduction | None = None) -> None:
        self._transport.wait_until(partial(_ended, self._started, reduction))
        self._started = [
            one for one in self._started if reduction is not None and one is not reduction
        ]

    def leave(self) -> None:
        self._started = []


class ProgressThread:
    """Progress engine with a background thread, which lives from the first start to the wait.

    The thread calls the transport only to poll started reductions that have not ended. Reductions
    add in the order of their plans, so the result is bitwise equal to a polled run. The thread also
    ends when the thread that started it ends. So a job that fails between start and wait can exit.

    raises  any error of the thread, at the next call; an error of an unexpected type becomes a
            CommError that names the rank
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._started: list[Reduction] = []
        self._ended: set[int] = set()  # ids of the reductions that have ended in the thread
        self._thread: threading.Thread | None = None
        self._stop = False
        self._error: Exception | None = None

    def start(self, reduction: Reduction) -> None:
        self.poll()
        reduction.start()
        # This follows the start: until then, the thread must not poll the reduction.
        self._ended.discard(id(reduction))
        self._started.append(reduction)
        if self._thread is None:
            self._begin()

    def _begin(self) -> None:
        self._stop = False
        sys.setswitchinterval(min(TURN, sys.getswitchinterval()))
        self._transport.admit_thread()
        self._thread = threading.Thread(
            target=self._run, args=(threading.current_thread(),), name="mover"
        )
        self._thread.start()

    def poll(self) -> None:
        if self._error is not None:
            raise self._error

    def wait(self, reduction: Reduction | None = None) -> None:
        left = [one for one in self._started if reduction is not None and one is not reduction]
        has_ended = id(reduction) in self._ended
        if not (left and has_ended):
            self._end()
        self.poll()
        if not has_ended:
            self._transport.wait_until(partial(_ended, self._started, reduction))
        self._started = left
        if left and self._thread is None:
            self._begin()

    def leave(self) -> None:
        self._end()
        self.poll()
        self._started = []

    def _end(self) -> None:
        if self._thread is not None:
            self._stop = True
            self._thread.join()
            self._thread = None
        self._ended.clear()

    def _run(self, owner: threading.Thread) -> None:
        def is_over() -> bool:
            if not self._stop:
                for reduction in tuple(self._started):
                    if id(reduction) not in self._ended and reduction.poll():
                        self._ended.add(id(reduction))
            return self._stop or not owner.is_alive()

        try:
            self._transport.wait_until(is_over, PAUSE)
        except MpitrainError as error:
            self._error = error
        except Exception as error:
            self._error = CommError(
                f"rank {self._transport.rank}: the progress thread of the reductions failed: "
                f"{type(error).__name__}: {error}"
            )
            self._error.__cause__ = error
        finally:
            self._transport.dismiss_thread()


def _ended(started: Sequence[Reduction], awaited: Reduction | None = None) -> bool:
    """Poll all reductions; return whether `awaited` has ended, or all of them if None."""
    # This polls every reduction, even if the first one has not ended.
    ended = {id(reduction): reduction.poll() for reduction in tuple(started)}
    return all(ended.values()) if awaited is None else ended[id(awaited)]


def mover(transport: Transport, reductions: Sequence[Reduction]) -> ProgressEngine:
    """Return the progress engine for these reductions: a ProgressThread or a PolledProgress.

    A thread needs a transport that admits it, and reductions whose `is_messages` is True. If
    all ranks are on one host, the engine polls, because a thread would hide little time there.
    """
    can = transport.admits_threads and all(reduction.is_messages for reduction in reductions)
    return (
        ProgressThread(transport)
        if can and len(set(transport.hosts)) > 1
        else PolledProgress(transport)
    )
