"""The watchdog, which ends the job if it makes no progress, and the report of a stall.

One rank judges the traces of all ranks, and prints the finding once. The ranks elect it by a file that only
one of them can create:

    RUN/trace/stall-1    the first judgement: {"verdict": "moving", "seconds": 2.0, "time": ...}
    RUN/trace/stall-2    the next one
"""

import faulthandler
import math
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from mpitrain.errors import ConfigError, say, visible
from mpitrain.files import ON_READ, write_whole
from mpitrain.machine.compiling import OBSERVER
from mpitrain.run.observation import Answering, Observation, observe, question, read_model
from mpitrain.trace.blame import MOVING, Finding, named
from mpitrain.trace.recorder import COMPUTE, SILENT, Recorder
from mpitrain.trace.timeline import TRACE
from mpitrain.transport.base import Traffic

LONGEST = 1.0
"""Longest time in seconds between two looks for progress."""
COMPILING = 600.0
"""Seconds after which a compilation no longer counts as progress."""
GRACE = 15.0
"""Seconds in which the rank that judges a stall must end the job."""
PREFIX = "stall-"
ANSWERED = 2.5
"""Longest time in seconds that the reporter waits for the stacks of all ranks."""
BLAMED, INNERMOST = 2, 8
"""Largest number of ranks whose stacks the report shows, and of frames of each."""
LEAST = 0.25
"""Shortest time in seconds between two judgements."""
WARNING = "warning: "
"""Begins a report after which the job goes on; `launch` takes any other as the failure."""


class Watchdog:
    """A thread that reports a stall: `seconds` without a new record and without a call of `alive`.

    A compilation and a block of a file that is read count as progress on the thread that has made the watchdog.

    One rank prints the first divergence of all ranks, and ends the job with exit code 1. Without
    traces each rank prints its own position. The thread makes no MPI call. A launcher ends the job
    if a rank exits without MPI_Finalize, unless it is fault-tolerant. The thread also answers the
    questions of `mpitrain runs report`.
    """

    def __init__(
        self,
        rank: int,
        seconds: float,
        traffic: Traffic | None = None,
        end: Callable[[], object] = lambda: os._exit(1),
    ):
        """Start the thread.

        seconds  without progress, after which the job ends
        traffic  the counters of this rank's transport; they name the message it waits for
        end      ends the job
        """
        self._end = end
        self._rank, self._seconds, self._traffic = rank, seconds, traffic or Traffic()
        self._doing, self._calls, self._pointer = "starting", 0, ""
        self._recorder: Recorder = SILENT
        self._answering: Answering | None = None
        self._report: StallReport | None = None
        self._does_end = True
        self._compilations = Compilations()
        self._observed = OBSERVER.set(self._compilations.running)
        self._reads = ON_READ.set(self._has_read)
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def alive(self, doing: str) -> None:
        """Restart the clock, and note the action that begins now."""
        self._doing = doing
        self._calls += 1

    def _has_read(self) -> None:
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
        ON_READ.reset(self._reads)
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
                        self._end()  # A launcher then ends the other ranks.
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
            self._end()
        return math.inf

    def _print_own(self, silent: float) -> None:
        waits_for, content = self._traffic.waits_for, self._traffic.content
        waiting = (
            f", waiting for {f'{content}: ' if content else ''}{waits_for}" if waits_for else ""
        )
        ends = "ending the job" if self._does_end else "run.on_stall is warn"
        who = f"{'' if self._does_end else WARNING}rank {self._rank} on {socket.gethostname()}"
        say(
            f"{who}: no progress for {silent:.0f} s in {self._doing}{waiting}; "
            f"{ends} (run.stall_seconds is {self._seconds:g}).{self._pointer}\n"
            "Its stacks:"
        )
        faulthandler.dump_traceback(sys.stderr)


class Compilations:
    """The compilation that runs now, if there is one. At each look, the trace gets a new span for it.

    recorder  of this rank; the watchdog replaces it
    """

    def __init__(self) -> None:
        self.recorder: Recorder = SILENT
        self._lock, self._name, self._span, self._until = threading.Lock(), -1, 0, 0.0

    @contextmanager
    def running(self, source: str) -> Iterator[None]:
        """Record the compilation of a source for the length of the context."""
        with self._lock:
            self._name = self.recorder.name(f"compiling {source}")
            self._span = self.recorder.begin(COMPUTE, self._name)
            self._until = time.monotonic() + COMPILING
        try:
            yield
        finally:
            with self._lock:
                self.recorder.end(self._span)
                self._name = -1

    def look(self) -> bool:
        """Return whether a compilation runs, and begin a new span of it."""
        with self._lock:
            if self._name < 0 or time.monotonic() > self._until:
                return False
            self.recorder.end(self._span)
            self._span = self.recorder.begin(COMPUTE, self._name)
            return True


class Verdict(BaseModel):
    """The decision of the judging rank about a stall; the other ranks read it.

    verdict  "moving": no rank is to blame yet, so they judge again later; else the finding has been
             printed, and the job goes on ("warned") or ends ("ends")
    seconds  until the next judgement, for "moving"
    time     of the judgement, in seconds since 1970
    """

    verdict: Literal["moving", "warned", "ends"]
    seconds: float
    time: float


class StallReport:
    """The judgements of one run, as one rank sees them."""

    def __init__(self, run_dir: Path, seconds: float, on_stall: str, answering: Answering):
        """seconds, on_stall: run.stall_seconds and run.on_stall; answering: that of this rank."""
        self._run_dir, self._seconds, self._answering = run_dir, seconds, answering
        self._verdict: Literal["warned", "ends"] = "ends" if on_stall == "end" else "warned"

    def verdict(self, since: float) -> Verdict | None:
        """Return the verdict about the present stall; None while another rank judges.

        since   begin of the stall, in seconds since 1970; an earlier warning was of another stall
        raises  OSError if the directory cannot be used; ConfigError if it has no traces
        """
        folder = self._run_dir / TRACE
        suffixes = (
            name.removeprefix(PREFIX) for name in os.listdir(folder) if name.startswith(PREFIX)
        )
        number = max((int(digits) for digits in suffixes if digits.isdecimal()), default=0)
        if number:
            verdict = read_model(folder / f"{PREFIX}{number}", Verdict)
            if verdict is None or verdict.verdict == "ends":
                return verdict
            if verdict.time + verdict.seconds > time.time():
                return verdict
            if verdict.verdict == "warned" and verdict.time >= since:
                return verdict
        return self._judge(folder / f"{PREFIX}{number + 1}")

    def _judge(self, file: Path) -> Verdict | None:
        """Make a judgement, and print its finding; None if another rank makes it."""
        try:
            file.touch(0o644, exist_ok=False)
        except FileExistsError:
            return None
        seen = observe(self._run_dir, {self._answering.rank: self._answering.recorder.clock()})
        finding = seen.finding(self._seconds)
        if finding.kind != MOVING:
            # Some file systems show traces late, so a question comes before blame.
            seen = question(self._run_dir, seen, True, ANSWERED, self._answering.look)
            finding = seen.finding(self._seconds)
        if finding.kind == MOVING:
            # Until the rank with the oldest sign among the moving may stall.
            ages = [seen.now - state.since for state in seen.states]
            rest = min((self._seconds - age for age in ages if age < self._seconds), default=0.0)
            verdict = Verdict(verdict="moving", seconds=max(LEAST, rest), time=time.time())
        else:
            verdict = Verdict(verdict=self._verdict, seconds=0.0, time=time.time())
            say(visible(self._text(seen, finding)))
        write_whole(file, verdict.model_dump_json())
        return verdict

    def _text(self, seen: Observation, finding: Finding) -> str:
        run = shlex.quote(str(self._run_dir))
        # Without a culprit, the rank that has waited longest.
        blamed = finding.culprits or ([] if finding.waiter is None else [finding.waiter])
        first = next((state for state in seen.states if state.rank in blamed[:1]), seen.states[0])
        lines = [
            # `launch` repeats a line that begins with a rank as its last line.
            f"{'' if self._verdict == 'ends' else WARNING}{named(first)}: the run stands still "
            f"(run.stall_seconds is {self._seconds:g}). {seen.text(finding)}"
        ]
        for rank in blamed[:BLAMED]:
            lines += seen.stack(rank, threads=1, frames=INNERMOST)
        if self._verdict == "ends":
            lines.append(f"The job ends now. `mpitrain runs report {run}` shows the last actions.")
        else:
            lines.append(
                f"The job goes on (run.on_stall is warn). Now: `mpitrain runs report {run} --now --stacks`."
            )
        return "\n".join(lines)
