"""One rank of a user's program, started by `mpitrain launch`: python -m mpitrain.transport.program
FILE ...
"""

import os
import signal
import socket
import sys
import threading
import traceback
from types import TracebackType

from mpitrain.errors import say
from mpitrain.machine import blas_kernels, process, status, stop_signals

STOPPED = 85
"""Exit code of a program that stopped on request, after a checkpoint."""

LINGER = 10.0
"""Seconds in which a program that has failed on a rank may end its threads, for which Python waits at an exit."""


def main(words: list[str]) -> None:
    """Run `FILE ...`, `-m MODULE ...` or `-c CODE ...` as Python does.

    BLAS uses this rank's part of the cores. A rank that raises, or exits with a code other than 0
    and 85, ends all ranks. Other ranks may be waiting for its messages, but one that has stopped
    leaves together with them. USR1 ends no rank: `mpitrain.torch.stop_requested` tells of it.
    """
    end = status.ProgramEnd((0, STOPPED))
    stop_signals.note(signal.SIGUSR1)
    process.limit_blas_threads()
    blas_kernels.choose()
    process.yield_crowded_cores()
    # These import NumPy, which must find the limit set.
    from mpi4py.run import run_command_line, set_abort_status

    from mpitrain.transport.failures import leave_at_once

    try:
        run_command_line(words)
    except SystemExit as left:
        if left.code not in (None, 0, STOPPED):
            set_abort_status(left)
            leave_at_once()
            _limit(left.code if isinstance(left.code, int) else 1)
        else:
            end.tell("left")
        raise
    except BaseException as error:
        say(f"rank {process.launched().rank}: ended by an exception on {socket.gethostname()}")
        traceback.print_exception(error.with_traceback(_below_here(error.__traceback__)))
        set_abort_status(error)
        leave_at_once()
        _limit(1)
        sys.exit(1)
    end.tell("left")


def _limit(code: int) -> None:
    """Let this process end within LINGER seconds: the other ranks wait until then."""

    def leave() -> None:
        others = {*threading.enumerate()} - {threading.main_thread()}
        own = sorted(thread.name for thread in others if not thread.daemon)
        what = f"thread {', '.join(own)}" if own else "what it does at its exit"
        rank = process.launched().rank
        say(f"rank {rank}: has failed, but {what} did not end within {LINGER:g} s; it is ended now")
        os._exit(code)

    timer = threading.Timer(LINGER, leave)
    timer.daemon = True
    timer.start()


def _below_here(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames that started the user's program."""
    while frames and (
        frames.tb_frame.f_globals is globals()
        or frames.tb_frame.f_globals.get("__name__") in ("mpi4py.run", "runpy")
    ):
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    main(sys.argv[1:])
