"""The watchdog, which ends the job if it makes no progress."""

import faulthandler
import math
import os
import shlex
import socket
import sys
import threading
import time
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.machine.compiling import OBSERVER
from mpitrain.run.stalls.compilations import Compilations
from mpitrain.run.stalls.questions import Answering
from mpitrain.run.stalls.report import LEAST, WARNING, StallReport
from mpitrain.trace.recorder import SILENT, Recorder
from mpitrain.transport.base import Traffic

LONGEST = 1.0
"""Longest time in seconds between two looks."""
GRACE = 15.0
"""Seconds in which the rank that judges a stall must end the job."""


class Watchdog:
    """A thread that reports a stall: `seconds` without a new record and without a call of `alive`.

    A compilation counts as progress if it runs on the thread that has made the watchdog.

    One rank prints the first divergence of all ranks, and ends the job with exit code 1. Without
    traces each rank prints its own position. The thread makes no MPI call. A launcher ends the job
    if a rank exits without MPI_Finalize. The thread answers the questions of `mpitrain runs report`,
    too.
    """

    def __init__(self, rank: int, seconds: float, traffic: Traffic | None = None):
        """Start the thread.

        seconds  without progress, after which the job ends
        traffic  the counters of this rank's transport; they name the message it waits for
        """
        self._rank, self._seconds, self._traffic = rank, seconds, traffic or Traffic()
        self._doing, self._calls, self._pointer = "starting", 0, ""
        self._recorder: Recorder = SILENT
        self._answering: Answering | None = None
        self._report: StallReport | None = None
        self._does_end = True
        self._compilations = Compilations()
        self._observed = OBSERVER.set(self._compilations.running)
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def alive(self, doing: str) -> None:
        """Restart the clock, and note the action that begins now."""
        self._doing = doing
        self._calls += 1

    def patience(self, seconds: float, on_stall: str = "end") -> None:
        """Set the limit to `seconds` and restart the clock; on_stall: as run.on_stall."""
        self._seconds, self._does_end = seconds, on_stall == "end"
        self._calls += 1

    def traces(self, folder: Path, recorder: Recorder) -> None:
        """Judge stalls by the traces of all ranks from now on.

        folder    run directory, which has the traces
        recorder  of this rank
        """
        self._pointer = f" `mpitrain runs report {shlex.quote(str(folder))}` names the rank that the others waited for."
        answering = Answering(folder, self._rank, recorder)
        on_stall = "end" if self._does_end else "warn"
        self._report = StallReport(folder, self._seconds, on_stall, answering)
        self._recorder, self._answering = recorder, answering
        self._compilations.recorder = recorder

    def close(self) -> None:
        """End the thread. Only the thread that has made the watchdog may call this."""
        OBSERVER.reset(self._observed)
        self._closed.set()

    def _watch(self) -> None:
        before, seen, silent, again = time.monotonic(), (-1, -1, -1), 0.0, 0.0
        compiled = 0
        while not self._closed.wait(pause := min(LONGEST, self._seconds / 4)):
            now = time.monotonic()
            # A pause of this process, as by SIGSTOP, is no silence.
            silent += min(now - before, 2 * pause)
            compiled += self._compilations.look()
            before, progress = now, (self._calls, self._recorder.newest, compiled)
            if progress != seen:
                seen, silent, again = progress, 0.0, 0.0
            if self._answering:
                self._answering.look()
            if silent > self._seconds and now >= again:
                again = now + self._stalled(silent)

    def _stalled(self, silent: float) -> float:
        """Report a stall, and end the process unless run.on_stall is warn.

        Return the seconds until the next judgement; infinity after a report.
        """
        began, since = time.monotonic(), time.time() - silent
        try:
            while self._report and time.monotonic() < began + GRACE:
                if verdict := self._report.verdict(since):
                    if verdict.verdict == "ends":
                        os._exit(1)  # A launcher then ends the other ranks.
                    if verdict.verdict == "warned":
                        return math.inf
                    rest = verdict.time + verdict.seconds - time.time()
                    return max(LEAST, min(verdict.seconds, rest))
                if self._answering:
                    self._answering.look()
                self._closed.wait(min(LONGEST, self._seconds / 4))
        except (OSError, ConfigError):
            pass  # Without readable traces this rank reports its own position.
        self._print_own(silent)
        if self._does_end:
            os._exit(1)
        return math.inf

    def _print_own(self, silent: float) -> None:
        waits_for, content = self._traffic.waits_for, self._traffic.content
        waiting = (
            f", waiting for {f'{content}: ' if content else ''}{waits_for}" if waits_for else ""
        )
        ends = "ending the job" if self._does_end else "run.on_stall is warn"
        who = f"{'' if self._does_end else WARNING}rank {self._rank} on {socket.gethostname()}"
        print(
            f"{who}: no progress for {silent:.0f} s in {self._doing}{waiting}; "
            f"{ends} (run.stall_seconds is {self._seconds:g}).{self._pointer}\n"
            "Its stacks:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(sys.stderr)
