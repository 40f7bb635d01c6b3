"""The guard of MPI calls: an MPI error becomes a CommError, and a lost peer becomes a PeerLost.

Only a fault-tolerant MPI (ULFM: `mpirun --with-ft ulfm` of Open MPI 5) reports a lost peer. Any other
MPI ends the job. This module does not import mpi4py: the transport passes in the module.
"""

from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from threading import RLock
from types import TracebackType
from typing import Any

from mpitrain.errors import CommError, PeerLost

LOSSES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
"""The error classes of ULFM; mpi4py has them from 4.1 on, and an MPI without ULFM none of them."""


def needs(wait: Any, left: Set[int]) -> bool:
    """Return whether a request or call is known to need a rank of `left`, the ranks that ended."""
    known = getattr(wait, "needs", None)
    return known is not None and known(left)


class MpiJob:
    """The MPI job of a root transport, with all that was made from it.

    lock           the lock of MPI's thread level "serialized": any thread may call MPI, but only one
                   at a time. Every call of MPI holds it
    admitted       number of threads besides the main thread that may call MPI; while it is above
                   0, no blocking wait holds the lock
    communicators  the open communicators, in the order of their creation
    requests       the requests under way: messages, and non-blocking collectives of the library
    call           the blocking call that the main thread is in, or None
    lost           the first PeerLost of this rank, or None
    """

    def __init__(self, mpi: Any):
        self.MPI = mpi
        self.lock, self.admitted = RLock(), 0
        self.communicators: list[Any] = []
        self.requests: set[Any] = set()
        self.call: Guard | None = None
        self.lost: PeerLost | None = None
        # Without ULFM mpi4py gives these names the value of ERR_UNKNOWN.
        self._losses = {getattr(mpi, name, mpi.ERR_UNKNOWN) for name in LOSSES} - {mpi.ERR_UNKNOWN}

    def __str__(self) -> str:
        return "; ".join(map(str, list(self.requests))) or "messages"

    def unending(self, left: Set[int]) -> Any:
        """Return a request under way if each of them needs a rank of `left`, else None."""
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

        The first lost peer revokes all communicators. So a rank that waits for a survivor notices
        the loss, too.

        name     of the failed call, for the message
        comm     its communicator; members has the rank of each of its ranks in the whole job
        """
        kind = error.Get_error_class()
        lost = self._failed(comm, members)
        if kind not in self._losses and not lost:
            return CommError(f"{name} failed: {error.Get_error_string()}")
        with self.lock:
            self.revoke()
        names = f"rank {', '.join(map(str, lost))} has" if lost else "another rank has"
        loss = PeerLost(
            f"{name} cannot complete: {names} ended ({error.Get_error_string()}).",
            "Start the job again; a run goes on from its last checkpoint with --resume=auto.",
            lost,
        )
        self.lost = self.lost or loss
        return loss

    def revoke(self) -> None:
        """Revoke every communicator, as MPI_Comm_revoke: all pending calls of all ranks then fail.

        The caller holds the lock. A second call does nothing.
        """
        if self.lost:
            return
        for comm in self.communicators:
            with suppress(self.MPI.Exception, NotImplementedError):
                comm.Revoke()

    def _failed(self, comm: Any, members: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks of the whole job that MPI reports as failed; () without ULFM."""
        if not self._losses:
            return ()
        try:
            failed, everyone = comm.Get_failed(), comm.Get_group()
            ranks = self.MPI.Group.Translate_ranks(failed, None, everyone)
        except (self.MPI.Exception, NotImplementedError):
            return ()
        return tuple(sorted(members[rank] for rank in ranks if 0 <= rank < len(members)))


class Guard:
    """A context of one MPI call: an exception of mpi4py becomes a CommError that names the call."""

    __slots__ = ("_comm", "_job", "_members", "_name", "_what", "awaits")

    def __init__(self, job: MpiJob, comm: Any, name: str, members: Sequence[int], what: str):
        """Make a context; `name` is the name of this rank in errors.

        awaits  ranks of the whole job without which the call cannot return
        """
        self._job, self._comm, self._name, self._members = job, comm, name, members
        self._what, self.awaits = what, members

    def __str__(self) -> str:
        return self._what

    def needs(self, left: Set[int]) -> bool:
        return any(rank in left for rank in self.awaits)

    def around(self, call: Callable[[], Any]) -> Callable[[], None]:
        """Return a function that makes the call within this guard."""

        def guarded() -> None:
            with self:
                call()

        return guarded

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
