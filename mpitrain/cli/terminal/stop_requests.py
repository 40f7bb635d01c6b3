"""The end of a run: signals that request it, the last line, and the filter of status lines in `launch`.

After Ctrl-C or TERM, prterun (the program behind `mpirun` since Open MPI 5) forwards no output. It
sends its ranks CONT at once, TERM after 0.25 s and KILL after another 0.25 s. None of its options
changes these times (odls_base_default_fns.c).
"""

import faulthandler
import json
import math
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mpitrain.cli import NOT_BEGUN, STOPPED
from mpitrain.machine.process import STOPS
from mpitrain.machine.status import status

SECONDS = 0.25
"""Seconds between CONT and TERM, and again between TERM and KILL."""
ADVICE = (
    f"note: mpirun kills its ranks {SECONDS} s after it sends them TERM, which may be before a checkpoint is written; "
    "`mpitrain launch` is needed to stop safely by Ctrl-C or TERM (or send mpirun USR1)"
)
ANNOUNCED = 1.2 * SECONDS
"""Seconds to wait for a TERM after the CONT that Open MPI's mpirun sends first."""
ATTEMPTS = 20
"""Attempts to remove a temporary directory in which files may still appear."""
EXIT = "/exit"
"""The line that ends a chat, also in place of the end of standard input, which Open MPI forwards to no rank."""
LONGEST = 8192
"""Upper bound of the bytes of a status line."""

MARK = b'\x1e{"mpitrain": '
TAG = rb"(?:^(?:(?:\[[^\]\n]*\])+(?:<\w+>)?: ?|\d+: ?))?"
"""The start of a line, with the tag of its rank that some launchers add."""
STATUS = re.compile(TAG + re.escape(MARK[:1]) + rb"(\{\"mpitrain\": .*)\n", re.MULTILINE)
UNFINISHED = re.compile(TAG + re.escape(MARK[:1]) + rb"[^\x1e\n]*\Z", re.MULTILINE)


def parent() -> str:
    """Return the name of the program that started this process, or "" if it is unknown.

    Below Open MPI's mpirun it is "prterun"; on other hosts "prted".
    """
    with suppress(OSError):
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    return ""


def say_last(text: str) -> None:
    """Write a line to mpirun's own standard output; print it if mpirun is not the parent."""
    if parent() == "prterun":
        with suppress(OSError):
            # The write does not block: a pipe without a reader must not delay the exit.
            flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            descriptor = os.open(f"/proc/{os.getppid()}/fd/1", flags)
            try:
                os.write(descriptor, f"{text}\n".encode())
                return
            finally:
                os.close(descriptor)
    print(text, flush=True)


class StatusFilter:
    """Removes the status lines from a stream of bytes.

    note  called with event and run directory of each status line
    held  bytes that may become a status line, and so are not passed on yet
    """

    def __init__(self, note: Callable[[str, str], None]):
        self._note = note
        self.held = b""

    def pass_on(self, chunk: bytes) -> bytes:
        """Return the bytes that belong to no status line."""
        data, self.held = STATUS.sub(self._read, self.held + chunk), b""
        rest = UNFINISHED.search(data)
        if rest and self._may_become_status(rest[0][rest[0].index(MARK[:1]) :]):
            data, self.held = data[: rest.start()], rest[0]
        return data

    def release(self) -> bytes:
        """Return the bytes held back, unless they have become the start of a status line."""
        held, self.held = self.held, b""
        if MARK in held:
            held, self.held = b"", held
        return held

    def _read(self, match: re.Match[bytes]) -> bytes:
        with suppress(ValueError, KeyError, TypeError):
            facts = json.loads(match[1])
            self._note(facts["mpitrain"], facts["run_dir"])
        return b""

    def _may_become_status(self, text: bytes) -> bool:
        return MARK.startswith(text) or (text.startswith(MARK) and len(text) < LONGEST)


def _not_begun() -> str:
    # Under `launch`, print a status line: `launch` then reports the reason of the signal.
    return status("not begun").rstrip() or NOT_BEGUN


class Stop:
    """What INT, TERM and USR1 do on this rank.

    Until `note`, such a signal ends the process; from then on it requests a stop of the run.

    Python code cannot handle a signal while MPI starts, because mpi4py holds the GIL. So until
    `connected`, the kernel's default action ends the process. From then on a thread handles
    signals, even while the main thread waits for a message.

    USR2 prints the Python stacks of this process, at any time.

    temporary  a directory that rank 0 removes if a signal ends the process
    """

    def __init__(self, last: Callable[[], str] = _not_begun, exit_code: int = STOPPED) -> None:
        """last       () -> the text that rank 0 prints if a signal ends the process
        exit_code  of a process that a signal ends
        """
        self._last, self._exit_code = last, exit_code
        self.temporary: Path | None = None
        self.requested = False
        self._is_noted = self._is_terminated = self._is_ended = False
        self._announced = -math.inf
        for number in STOPS:
            signal.signal(number, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR2)

    def connected(self, rank: int) -> None:
        """Handle signals from now on: the ranks are connected, and rank 0 can report an early end."""
        heard, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        threading.Thread(target=self._listen, args=(heard, rank), name="stop", daemon=True).start()
        for number in STOPS:
            signal.signal(number, self._note)
        if parent() in ("prterun", "prted"):
            signal.signal(signal.SIGCONT, self._announce)

    def note(self) -> None:
        """Let signals stop the run after a checkpoint from now on, instead of ending the process."""
        self._is_noted = True

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.requested and self._is_noted and not self._is_ended:
            # A second INT is from a person who wants the end at once. Schedulers send TERM repeatedly.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.temporary and not self._is_noted:
            time.sleep(1)  # The main thread makes no more files, and the other thread removes them.
        self.requested = True

    def _announce(self, number: int, frame: object) -> None:
        self._announced = time.monotonic()

    def ended(self) -> None:
        """Let no signal end the process from now on: the run has saved everything, and only a sample follows."""
        self._is_ended = True

    def over(self) -> None:
        """Ignore signals from now on: nothing is left to stop.

        Python removes its handlers before MPI_Finalize. A late signal, of a user or a batch script,
        would then kill the rank, and a finished run would seem to have failed.
        """
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)

    def asked(self) -> bool:
        """Return whether a stop was requested.

        After a CONT this waits for a TERM: Open MPI's mpirun sends CONT shortly before TERM, and
        the next step would take time that the checkpoint needs. After any other CONT only this wait
        is lost.
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
        """On rank 0, print the line that ends the run.

        After TERM, mpirun forwards no output: the line is then written to mpirun's own standard
        output.
        """
        if self._is_terminated:
            say_last(text)
        else:
            print(text, flush=True)
