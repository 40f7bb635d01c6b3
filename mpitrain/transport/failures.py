"""Failed MPI calls, lost peers and ranks that end too early: each becomes an error, or ends the job.

An MPI error becomes a CommError, and a lost peer a PeerLost (`MpiJob`, `Guard`). Only a fault-tolerant
MPI reports a lost peer (`ulfm.py`). Any other MPI ends the job.
MPI_Finalize waits for all ranks. So a rank that ends too early would wait in MPI_Finalize, and the
others for its messages. It therefore tells all ranks, and a rank that still needs it ends the job
(`Departures`).
This module does not import mpi4py: the transport passes in `mpi4py.MPI`.
"""

import atexit
import faulthandler
import os
import re
import sys
import threading
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any

import numpy as np

from mpitrain.errors import CommError, PeerLost
from mpitrain.machine import process
from mpitrain.machine.process import SHARED_MEMORY
from mpitrain.transport import ulfm


def needs(wait: Any, left: Set[int]) -> bool:
    """Return whether a request or call is known to need a rank of `left`, the ranks that ended."""
    known = getattr(wait, "needs", None)
    return known is not None and known(left)


class NoLock:
    """Stands in for a lock where MPI itself admits several threads at a time."""

    def acquire(self, timeout: float = -1) -> bool:
        return True

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


LOCK = threading.RLock()
"""The lock of MPI's thread level "serialized": any thread may call MPI, but only one at a time."""


class MpiJob:
    """The MPI job of a root transport, with all that was made from it.

    lock           LOCK, which every call of MPI holds; at level "multiple" it excludes nobody
    admitted       number of threads besides the main thread that may call MPI; while it is above
                   0, no blocking wait holds the lock
    communicators  the open communicators, in the order of their creation
    requests       the requests under way: messages, and non-blocking collectives of the library
    call           the blocking call that the main thread is in, or None
    lost           the first PeerLost of this rank, or None
    is_abandoned   no wait of this job goes on
    crowded_until  until then (time.monotonic) other work shares this rank's core
    """

    def __init__(self, mpi: Any):
        self.MPI = mpi
        is_free = mpi.Query_thread() >= mpi.THREAD_MULTIPLE
        self.lock: Any = NoLock() if is_free else LOCK
        self.admitted, self.is_abandoned, self.crowded_until = 0, False, 0.0
        self.communicators: list[Any] = []
        self.requests: set[Any] = set()
        self.call: Guard | None = None
        self.lost: PeerLost | None = None
        self._losses = ulfm.loss_classes(mpi)

    def __str__(self) -> str:
        return "; ".join(map(str, list(self.requests))) or "messages"

    def unending(self, left: Set[int]) -> Any:
        """Return one of the requests under way if all of them need a rank of `left`, else None."""
        requests = list(self.requests)
        return requests[0] if requests and all(needs(one, left) for one in requests) else None

    def opened(self, comm: Any) -> Any:
        """Note a communicator that was just made, and return it."""
        self.communicators.append(comm)
        return comm

    def free(self, comm: Any) -> None:
        """Free a communicator. The caller holds the lock."""
        self.communicators = [one for one in self.communicators if one is not comm]
        comm.Free()

    def error(self, error: Any, name: str, comm: Any, members: Sequence[int]) -> CommError:
        """Return the error to raise for an exception of mpi4py.

        The first lost peer revokes all communicators (MPI_Comm_revoke): all pending calls of all
        ranks then fail. So a rank that waits for a survivor notices the loss, too.

        name     name of the failed call, for the message
        comm     communicator of the call
        members  for each rank of that communicator, its rank in the whole job
        """
        kind = error.Get_error_class()
        lost = ulfm.failed(self.MPI, comm, members) if self._losses else ()
        if kind not in self._losses and not lost and not self.lost:
            return CommError(f"{name} failed: {error.Get_error_string()}")
        if not self.lost:
            ulfm.revoke(self)
        names = f"rank {', '.join(map(str, lost))} has" if lost else "another rank has"
        loss = PeerLost(
            f"{name} cannot complete: {names} ended ({error.Get_error_string()}).",
            "Start the job again; a run goes on from its last checkpoint with --resume=auto.",
            lost,
        )
        self.lost = self.lost or loss
        return loss


class Guard:
    """A context of one MPI call: an exception of mpi4py becomes a CommError that names the call.

    awaits  ranks of the whole job without which the call cannot return
    """

    __slots__ = ("_comm", "_job", "_members", "_name", "_what", "awaits")

    def __init__(self, job: MpiJob, comm: Any, name: str, members: Sequence[int], what: str):
        """Make a context; `name` is the name of this rank in errors."""
        self._job, self._comm, self._name, self._members = job, comm, name, members
        self._what, self.awaits = what, members

    def __str__(self) -> str:
        return self._what

    def needs(self, left: Set[int]) -> bool:
        return any(rank in left for rank in self.awaits)

    def __enter__(self) -> None:
        self._job.call = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._job.call = None
        if kind is not None and issubclass(kind, self._job.MPI.Exception):
            what = f"{self._name}: {self._what}"
            raise self._job.error(error, what, self._comm, self._members) from error


LARGEST = 256
"""Largest job whose ranks send notices: every rank sends one to every other rank."""
PATIENCE = 2.0
"""Seconds in which messages of an ended rank may still arrive."""
PAUSE = 0.25
"""Seconds between two looks of the watch thread."""
ENDED = 0x1EF7
"""The content of a notice; another value means that MPI has not filled the buffer yet."""


class Departures:
    """The notices of all ranks of MPI_COMM_WORLD, and the thread that watches them.

        rank 0, main thread    recv from rank 1 ............................... MPI_Abort
        rank 0, watch thread       notice of rank 1, PATIENCE seconds pass ----'
        rank 1                 sys.exit(0): a notice to each rank, then a wait for their notices

    The main thread may be blocked inside MPI, and no second thread may call MPI meanwhile. So the
    receives of all notices are posted at the start. MPI fills their buffers while the main thread
    waits, and the watch thread only reads these buffers.
    """

    def __init__(self, mpi: Any):
        """Post a receive for the notice of each rank, and start the thread. Collective."""
        self._mpi, self._comm = mpi, mpi.COMM_WORLD.Dup()
        self._notices = np.zeros(self._comm.size, np.int32)
        self._others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        self._requests = [
            self._comm.Irecv(self._notices[rank : rank + 1], rank) for rank in self._others
        ]
        self._watched: list[tuple[MpiJob, Any]] = []
        self._closed, self._process = threading.Event(), os.getpid()
        threading.Thread(target=self._watch, name="departures", daemon=True).start()
        # MPI_Finalize begins by deleting the attributes of MPI_COMM_SELF.
        self._key = mpi.Comm.Create_keyval(delete_fn=lambda *of: self._leave())
        mpi.COMM_SELF.Set_attr(self._key, self)
        atexit.register(_at_exit, self)

    def watch(self, job: MpiJob, traffic: Any) -> None:
        """Watch the main thread's waits in one more root transport, such as a second `connect`."""
        self._watched.append((job, traffic))

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
        for job, traffic in self._watched:
            if call := job.call or traffic.waits_for:
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
        sys.stderr.write(f"rank {self._comm.rank}: {error.named()}\n")
        sys.stderr.flush()
        # The main thread is inside MPI, and may hold the lock.
        self._watched[0][0].lock.acquire(timeout=PAUSE)
        end_job(self._comm, PeerLost.exit_code)

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


# The timers below end a rank if MPI does not let it go: a barrier, MPI_Finalize or MPI_Abort may
# hang. mpi4py holds the interpreter's lock in MPI_Finalize, so no thread of Python could run. The
# timer of faulthandler is a thread of C: it needs no lock.

ABORT_SECONDS = 3.0
"""Seconds for MPI_Abort, which ends the process long before."""


def end_job(comm: Any, exit_code: int) -> None:
    """Call MPI_Abort; the process ends even if MPI does not end it."""
    # The reason of the abort is printed already, and a stack would only hide it.
    nothing = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(ABORT_SECONDS, exit=True, file=nothing)
    comm.Abort(exit_code)


def leave_within(seconds: float) -> None:
    """Limit the time from now to the end of MPI_Finalize, which this process calls when it exits.

    After it the process ends with exit code 1, and prints the stack of each thread. mpi4py would
    call MPI_Finalize after the interpreter, which removes the timer. A rank that may have lost
    another one leaves without MPI_Finalize, which may then hang.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    if not process.outlives_ranks():
        atexit.register(_finalize)


def _finalize() -> None:
    if "mpi4py.MPI" in sys.modules and not sys.modules["mpi4py.MPI"].Is_finalized():
        sys.modules["mpi4py.MPI"].Finalize()
    faulthandler.cancel_dump_traceback_later()


MPICH = r"mpich_shm_\w+"
OPEN_MPI = r"sm_segment\.[\w.-]+\.{user}\.[0-9a-f]+\.0"


def unlink_mapped(is_alone: bool) -> None:
    """Unlink the shared-memory files of MPI that this process has mapped; for one rank of a host.

    MPICH unlinks them only in MPI_Finalize, so a job that dies would leave them in /dev/shm. A
    mapping outlives the name of its file. All ranks of the host must have mapped them, which
    MPI_Init does. Open MPI opens its files later, by name, and its mpirun removes them.

    is_alone  the job has one rank, perhaps without mpirun: files of Open MPI are removed too
    """
    files = f"{MPICH}|{OPEN_MPI.format(user=os.geteuid())}" if is_alone else MPICH
    names = re.compile(f"{re.escape(SHARED_MEMORY)}/({files})", re.ASCII)
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.rstrip("\n").partition("/")[2] for line in maps}
        for path in paths:
            if names.fullmatch(f"/{path}"):
                os.unlink(f"/{path}")
