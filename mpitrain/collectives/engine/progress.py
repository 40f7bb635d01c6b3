"""Who moves started reductions along while something else is computed: whoever polls, or a thread."""

import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from mpitrain.collectives.engine.executor import Reduction
from mpitrain.errors import CommError, MpitrainError
from mpitrain.transport.base import Transport

PAUSE = 2e-4
"""Shortest pause of the thread between two rounds of polls, in seconds: a round may take the interpreter from the main
thread."""

TURN = 2e-4
"""Seconds after which a thread that asks for the interpreter is given it, once a process moves by thread: Python's own 5 ms leave
links idle whenever the main thread is between two long operations."""


class ProgressEngine(Protocol):
    """Takes reductions of one transport from their start to their end. Called by one thread, in one order on all ranks."""

    def start(self, reduction: Reduction) -> None:
        """Start it."""

    def poll(self) -> None:
        """Move what can be moved now."""

    def wait(self, reduction: Reduction | None = None) -> None:
        """Block until all that was started has ended, or this one of them; all are moved meanwhile."""

    def leave(self) -> None:
        """Move nothing any more: whoever has started something waits for it."""


class PolledProgress:
    """Moves reductions when it is called, and not in between."""

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
    """Moves reductions from a thread of its own, which lives from the first start to the wait.

    The thread calls the transport only to poll started reductions, and polls none that it has seen end.
    A reduction adds in the order of its plan, so results are those of `PolledProgress`, bit for bit.
    The thread also ends when the thread that started it does: a job that fails between start and wait
    is not held up.
    raises  what was raised in the thread, at the next call, as an error that names the rank
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._started: list[Reduction] = []
        self._ended: set[int] = set()  # ids of those that the thread has seen end
        self._thread: threading.Thread | None = None
        self._stop = False
        self._error: Exception | None = None

    def start(self, reduction: Reduction) -> None:
        self.poll()
        reduction.start()
        self._ended.discard(id(reduction))  # not before: the thread may still look at it
        self._started.append(reduction)
        if self._thread is None:
            self._begin()

    def _begin(self) -> None:
        """Let a thread move what is under way."""
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
        """Have no thread."""
        if self._thread is not None:
            self._stop = True
            self._thread.join()
            self._thread = None
        self._ended.clear()

    def _run(self, owner: threading.Thread) -> None:
        """The thread."""

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
                f"rank {self._transport.rank}: what moves reductions beside the training step failed: "
                f"{type(error).__name__}: {error}"
            )
            self._error.__cause__ = error
        finally:
            self._transport.dismiss_thread()


def _ended(started: Sequence[Reduction], awaited: Reduction | None = None) -> bool:
    """Poll everything; True when all have ended, or the one that is awaited has."""
    ended = {
        id(reduction): reduction.poll() for reduction in tuple(started)
    }  # every one, whatever the first says
    return all(ended.values()) if awaited is None else ended[id(awaited)]


def mover(
    transport: Transport, reductions: Sequence[Reduction], thread: str = "auto"
) -> ProgressEngine:
    """What moves these reductions: a thread, if there are several hosts, MPI takes calls of several threads, and all reductions
    are messages of host memory; otherwise whoever polls. Within one host a thread would hide little.

    thread  as replication.progress_thread
    """
    can = (
        thread != "no"
        and transport.admits_threads
        and all(reduction.is_messages for reduction in reductions)
    )
    return (
        ProgressThread(transport)
        if can and len(set(transport.hosts)) > 1
        else PolledProgress(transport)
    )
