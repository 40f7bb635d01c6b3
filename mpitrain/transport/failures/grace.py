"""Timers that end a rank if MPI does not let it go: a barrier, MPI_Finalize or MPI_Abort may hang.

mpi4py holds the interpreter's lock in MPI_Finalize, so no thread of Python could run. The timer of
faulthandler is a thread of C: it needs no lock.
"""

import atexit
import faulthandler
import os
import sys
from typing import Any

ABORT_SECONDS = 3.0
"""Seconds for MPI_Abort, which ends the process long before."""


def end_within(seconds: float) -> None:
    """End this process with exit code 1 after so many seconds, and print the stack of each thread."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def abort(comm: Any, exit_code: int) -> None:
    """Call MPI_Abort; the process ends even if MPI does not end it."""
    # The reason of the abort is printed already, and a stack would only hide it.
    nothing = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(ABORT_SECONDS, exit=True, file=nothing)
    comm.Abort(exit_code)


def leave_within(seconds: float) -> None:
    """Limit the time from now to the end of MPI_Finalize, which this process calls when it exits.

    mpi4py would call MPI_Finalize after the interpreter, which removes the timer.
    """
    end_within(seconds)
    atexit.register(_finalize)


def _finalize() -> None:
    if "mpi4py.MPI" in sys.modules and not sys.modules["mpi4py.MPI"].Is_finalized():
        sys.modules["mpi4py.MPI"].Finalize()
    faulthandler.cancel_dump_traceback_later()
