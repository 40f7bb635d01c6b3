"""The watchdog, which ends the job if a rank makes no progress."""

import faulthandler
import os
import shlex
import socket
import sys
import threading
import time
from pathlib import Path

from mpitrain.transport.requests import Traffic


class Watchdog:
    """A watchdog thread: it ends the process if no `alive` is called for `seconds`.

    It prints the message that the rank waits for and the stack of each thread, and exits with 1.
    It makes no MPI call. A launcher ends the job if a rank exits without MPI_Finalize.
    """

    def __init__(self, rank: int, seconds: float, traffic: Traffic | None = None):
        """Start the thread.

        seconds  without progress, after which the process ends
        traffic  the counters of this rank's transport; they name the message it waits for
        """
        self._rank, self._seconds, self._traffic = rank, seconds, traffic or Traffic()
        self._doing, self._since, self._pointer = "starting", time.monotonic(), ""
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def alive(self, doing: str) -> None:
        """Restart the clock, and note the action that begins now."""
        self._doing, self._since = doing, time.monotonic()

    def patience(self, seconds: float) -> None:
        """Set the limit to `seconds` and restart the clock."""
        self._since, self._seconds = time.monotonic(), seconds

    def traces(self, folder: Path) -> None:
        """Set the run directory that holds the traces of all ranks; the message will name it."""
        self._pointer = f" `mpitrain report {shlex.quote(str(folder))}` names the rank that the others waited for."

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._seconds / 4)):
            silent = time.monotonic() - self._since
            if silent > self._seconds:
                waits_for, content = self._traffic.waits_for, self._traffic.content
                waiting = (
                    f", waiting for {f'{content}: ' if content else ''}{waits_for}"
                    if waits_for
                    else ""
                )
                print(
                    f"rank {self._rank} on {socket.gethostname()}: no progress for {silent:.0f} s in {self._doing}{waiting}; "
                    f"ending the job (run.stall_seconds is {self._seconds:g}).{self._pointer} Where it stands:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(sys.stderr)
                os._exit(1)
