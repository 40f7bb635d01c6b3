"""The failures of run.inject outside the passes of layers, as a table of functions."""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from mpitrain.transport.base import FIRST_CLAIMED_TAG, Transport

TAG = FIRST_CLAIMED_TAG - 1
"""The tag of the messages that two deadlocked ranks wait for; no other message has it."""


def partner(transport: Transport, rank: int) -> int:
    """Return the rank that deadlocks with `rank`: the next one."""
    return (rank + 1) % transport.size


def kill(transport: Transport, rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(transport: Transport, rank: int) -> None:
    ctypes.string_at(0)


def stop(transport: Transport, rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(transport: Transport, rank: int) -> NoReturn:
    """End the program as Python does: handlers run, and mpi4py calls MPI_Finalize."""
    sys.exit(0)


def vanish(transport: Transport, rank: int) -> NoReturn:
    """End the process at once: no handler runs, and MPI is not finalized."""
    os._exit(0)


def fail(transport: Transport, rank: int) -> NoReturn:
    raise RuntimeError(f"run.inject raises an exception on rank {rank}")


def exhaust(transport: Transport, rank: int) -> None:
    """Ask NumPy for more memory than any machine has; NumPy raises MemoryError."""
    np.empty(1 << 60, np.uint8)


def fill_disk(transport: Transport, rank: int) -> None:
    """Let every write of this process that makes a file larger fail with EFBIG."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def deadlock(transport: Transport, rank: int) -> None:
    """Wait for a message of the partner, which waits for one of this rank."""
    next_one = partner(transport, rank)
    transport.recv(np.empty(1), next_one if transport.rank == rank else rank, TAG)


def mismatch(transport: Transport, rank: int) -> None:
    """Enter a barrier that no other rank enters."""
    transport.barrier()


FAILURES: dict[str, Callable[[Transport, int], object]] = {
    "kill": kill,
    "segfault": segfault,
    "stop": stop,
    "exit": leave,
    "_exit": vanish,
    "raise": fail,
    "oom": exhaust,
    "disk": fill_disk,
    "deadlock": deadlock,
    "mismatch": mismatch,
}
"""The failures by kind: (transport of all ranks, rank of the failure); called on the rank that fails."""
