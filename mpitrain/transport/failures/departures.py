"""Departures: a rank that ends tells all ranks, and a rank that still needs it ends the job.

MPI_Finalize waits for all ranks. So a rank that ends too early would wait in MPI_Finalize, and the
others for its messages.

    rank 0, main thread    recv from rank 1 ............................... MPI_Abort
    rank 0, watch thread       notice of rank 1, PATIENCE seconds pass ----'
    rank 1                 sys.exit(0): a notice to each rank, then a wait for their notices

The main thread may be blocked inside MPI, and no second thread may call MPI meanwhile. So the
receives of all notices are posted at the start. MPI fills their buffers while the main thread
waits, and the watch thread only reads these buffers.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Set
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

import numpy as np

from mpitrain.errors import PeerLost
from mpitrain.transport.failures import grace
from mpitrain.transport.failures.guard import MpiJob, needs

LARGEST = 256
"""Largest job whose ranks send notices: every rank sends one to every other rank."""
PATIENCE = 2.0
"""Seconds in which messages of an ended rank may still arrive."""
PAUSE = 0.25
"""Seconds between two looks of the watch thread."""
ENDED = 0x1EF7
"""The content of a notice; another value means that MPI has not filled the buffer yet."""


class Waits(Protocol):
    """A protocol of `Traffic`: the request for which the main thread waits, or None."""

    waits_for: Any


class Departures:
    """The notices of all ranks of MPI_COMM_WORLD, and the thread that watches them."""

    def __init__(self, mpi: Any):
        """Post a receive for the notice of each rank, and start the thread. Collective."""
        self._mpi, self._comm = mpi, mpi.COMM_WORLD.Dup()
        self._notices = np.zeros(self._comm.size, np.int32)
        self._others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        self._requests = [
            self._comm.Irecv(self._notices[rank : rank + 1], rank) for rank in self._others
        ]
        self._watched: list[tuple[MpiJob, Waits]] = []
        self._closed, self._process = threading.Event(), os.getpid()
        threading.Thread(target=self._watch, name="departures", daemon=True).start()
        # MPI_Finalize begins by deleting the attributes of MPI_COMM_SELF.
        self._key = mpi.Comm.Create_keyval(delete_fn=lambda *of: self._leave())
        mpi.COMM_SELF.Set_attr(self._key, self)
        atexit.register(_at_exit, self)

    def watch(self, job: MpiJob, waits: Waits) -> None:
        """Watch the main thread's waits in one more root transport, such as a second `connect`."""
        self._watched.append((job, waits))

    def _watch(self) -> None:
        before, seen, blocked = time.monotonic(), None, 0.0
        while not self._closed.wait(PAUSE):
            now = time.monotonic()
            # A pause of this process, as by SIGSTOP, is no wait.
            blocked += min(now - before, 2 * PAUSE)
            before, left = now, {rank for rank in self._others if self._notices[rank] == ENDED}
            call = self._unending(left) if left else None
            if call is None or call is not seen:
                seen, blocked = call, 0.0
            elif blocked >= PATIENCE:
                self._end(call, sorted(left))

    def _unending(self, left: Set[int]) -> Any:
        """Return the call or request that cannot complete without the ended ranks, or None."""
        for job, waits in self._watched:
            if call := job.call or waits.waits_for:
                return job.unending(left) if call is job else call if needs(call, left) else None
        return None

    def _end(self, call: Any, left: list[int]) -> None:
        lost = tuple(rank for rank in left if needs(call, {rank})) or tuple(left)
        names = f"rank {lost[0]} has" if len(lost) == 1 else f"ranks {str(lost)[1:-1]} have"
        error = PeerLost(
            f"{call} cannot complete: {names} ended.",
            "Let all ranks make the same calls; `with mpitrain.ranks() as transport:` ends a job at once.",
            lost,
        )
        # In one write, so that no line of another rank stands within it.
        sys.stderr.write(f"rank {self._comm.rank}: {error}\n")
        sys.stderr.flush()
        # The main thread is inside MPI, and may hold the lock.
        self._watched[0][0].lock.acquire(timeout=PAUSE)
        grace.abort(self._comm, PeerLost.exit_code)

    def at_exit(self) -> None:
        """Leave now; MPI_Finalize comes after the interpreter, which can then call no Python."""
        if not self._mpi.Is_finalized() and os.getpid() == self._process:
            self._mpi.COMM_SELF.Delete_attr(self._key)

    def _leave(self) -> None:
        """Tell all ranks that this rank ends, and wait until all of them end.

        MPI_Finalize would wait for them, too, but would occupy a core.
        """
        if os.getpid() != self._process:
            return
        self._closed.set()
        lock, notice, pause = self._watched[0][0].lock, np.array([ENDED], np.int32), 1e-4
        with suppress(self._mpi.Exception):
            with lock:
                self._requests += [self._comm.Isend(notice, rank) for rank in self._others]
            while True:
                with lock:
                    if self._mpi.Request.Testall(self._requests):
                        return
                time.sleep(pause)
                pause = min(2 * pause, 0.01)


def _at_exit(departures: Departures) -> None:
    departures.at_exit()


def leave_at_once() -> None:
    """Let the end of this process end the job: it sends no notices, and waits for no other rank."""
    atexit.unregister(_at_exit)


@cache
def departures(mpi: Any) -> Departures:
    """Return the departures of this process. Collective at the first call.

    mpi  the module mpi4py.MPI
    """
    return Departures(mpi)
