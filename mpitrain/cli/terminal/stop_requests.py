"""Stop requests: the signals that ask a command for its results so far, and an end."""

import faulthandler
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mpitrain.cli import NOT_BEGUN, STOPPED
from mpitrain.cli.terminal import last_words
from mpitrain.cli.terminal.status import status

ANNOUNCED = 1.2 * last_words.SECONDS
"""Seconds to wait for a TERM after the CONT that Open MPI's mpirun sends first."""
ATTEMPTS = 20
"""Attempts to remove a temporary directory in which files may still appear."""
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that request a stop."""


def _not_begun() -> str:
    # Under `launch`, print a status line: `launch` then reports the reason of the signal.
    return status("not begun").rstrip() or NOT_BEGUN


class Stop:
    """The handling of INT, TERM and USR1 on this rank.

    Until `note`, a signal ends the process; from then on it requests a stop.

    mpi4py starts MPI with the GIL held, so no Python code can handle a signal meanwhile. Until
    `connected`, the default action of the kernel therefore ends the process. From then on a thread
    handles signals, even while the main thread waits for a message.

    USR2 prints the Python stacks of this process, at any time.

    temporary  a directory that rank 0 removes if a signal ends the process
    """

    def __init__(self, last: Callable[[], str] = _not_begun, exit_code: int = STOPPED) -> None:
        """Take the text that rank 0 prints if a signal ends the process, and the exit code."""
        self._last, self._exit_code = last, exit_code
        self.temporary: Path | None = None
        self.requested = False
        self._is_noted = self._is_terminated = False
        self._announced = -math.inf
        for number in REQUESTS:
            signal.signal(number, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR2)

    def connected(self, rank: int) -> None:
        """Install the handlers once the ranks are connected; rank 0 now reports an early end."""
        heard, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        threading.Thread(target=self._listen, args=(heard, rank), name="stop", daemon=True).start()
        for number in REQUESTS:
            signal.signal(number, self._note)
        if last_words.parent() in ("prterun", "prted"):
            signal.signal(signal.SIGCONT, self._announce)

    def note(self) -> None:
        """Let later signals stop the run after a checkpoint. Earlier ones end the process at once."""
        self._is_noted = True

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.requested and self._is_noted:
            # A second INT is from a person who wants the end at once. Schedulers send TERM repeatedly.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.temporary and not self._is_noted:
            time.sleep(1)  # The main thread makes no more files, and the other thread removes them.
        self.requested = True

    def _announce(self, number: int, frame: object) -> None:
        self._announced = time.monotonic()

    def over(self) -> None:
        """Ignore USR1 from now on, because the run has saved everything.

        Python removes its handlers before MPI_Finalize. A late signal of a batch script would then
        kill the rank. A finished run would seem to have failed.
        """
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def asked(self) -> bool:
        """Return whether a stop was requested.

        A CONT from Open MPI's mpirun may announce its TERM, so wait for that TERM. Otherwise the
        next step would take time that the checkpoint needs. Any other CONT costs only this wait.
        """
        while not self.requested and time.monotonic() < self._announced + ANNOUNCED:
            time.sleep(0.002)
        return self.requested

    def _listen(self, heard: int, rank: int) -> None:
        while number := os.read(heard, 1):
            if number[0] == signal.SIGCONT:
                continue
            self._is_terminated |= number[0] == signal.SIGTERM
            # The first rank that exits may make the launcher end rank 0, so rank 0 prints first.
            time.sleep(1 if rank > 0 else 0)
            if not self._is_noted:
                if rank == 0:
                    self.say(self._last())
                    self._remove()
                os._exit(self._exit_code)

    def _remove(self) -> None:
        for _ in range(ATTEMPTS):  # The call that the signal interrupted may still make a file.
            if self.temporary and self.temporary.exists():
                shutil.rmtree(self.temporary, ignore_errors=True)

    def say(self, text: str) -> None:
        """Print the line of rank 0 that ends the run.

        After TERM, mpirun forwards no output: the line then goes to mpirun's own standard output.
        """
        if self._is_terminated:
            last_words.say(text)
        else:
            print(text, flush=True)
