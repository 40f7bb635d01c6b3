"""The output of a launched job, from which `launch` reads the state of the run and its killed rank.

Bytes are forwarded at once and unchanged, with three exceptions. Status lines of rank 0 are
removed. Open MPI's boxes about an ended rank are dropped if our own message reports the same. PMIX
errors and warnings of libevent are dropped after such a message or after the end of the run.
"""

import os
import re
import select
import threading
import time
from contextlib import suppress

from mpitrain.cli.launch.failed import Failure
from mpitrain.cli.launch.killed import KILLED, KilledRanks
from mpitrain.cli.terminal.output import Screen
from mpitrain.cli.terminal.stop_requests import StatusFilter

RULE = b"-" * 74
"""The line above and below each of Open MPI's boxes."""
BOX = re.compile(RULE + rb"\r?\n.*?\n" + RULE + rb"\r?\n", re.DOTALL)
LONGEST = 4096
"""Largest box in bytes. The same number of earlier bytes is searched again with new output."""
PAUSE = 0.3
"""Seconds without a byte after which an unfinished box is shown."""

PMIX = re.compile(rb"\[\S+:\d+\] PMIX ERROR")
EPOLL = b"[warn] Epoll "
"""The start of a line of libevent in Open MPI's mpirun, when a rank ends while it is watched."""
ENDINGS = re.compile(
    rb"processes exited with non-zero status|MPI_ABORT was invoked|exited due to process rank"
)


class LauncherOutput:
    """The state of a run, read from its output.

    began   whether the run has a run directory
    end     event of the status line that closed the run: "ended", "stopped" or "not begun"; "" before
    run     the run directory; "" before
    spoken  whether any byte was shown on standard error
    killed  the ranks that a signal ended
    failure the first failure that a rank reported
    """

    def __init__(self) -> None:
        self.began = self.spoken = False
        self.end = self.run = ""
        self.killed, self.failure = KilledRanks(), Failure()

    def note(self, event: str, run_dir: str) -> None:
        if event == "began":
            self.began, self.run = True, run_dir
        elif not self.end:
            self.end = event


class OutputFilter:
    """A filter for standard output that shows all bytes at once."""

    held = b""

    def __init__(self, words: LauncherOutput, has_errors: bool = False):
        """Make a filter; has_errors: ranks report failures here, as to standard error."""
        self._words, self._recent, self._has_errors = words, b"", has_errors

    def pass_on(self, chunk: bytes) -> bytes:
        """Return the bytes to show now."""
        self._recent += chunk
        lines = self._recent[: self._recent.rfind(b"\n") + 1]
        self._words.killed.read(lines)
        if self._has_errors:
            self._words.failure.read(lines)
        self._recent = self._recent[-LONGEST:]
        return chunk

    def release(self) -> bytes:
        """Return the withheld bytes, to be shown after all."""
        return b""


class Errors:
    """A filter for standard error that drops boxes and lines that repeat a message.

    server  prefix of the launcher's own lines
    held    withheld bytes that may become such a box or line
    """

    def __init__(self, words: LauncherOutput, server: bytes):
        self._words, self._server = words, server
        self._said = OutputFilter(words, True)
        self._at_line_start, self._follows_box = True, False
        self.held = b""

    def pass_on(self, chunk: bytes) -> bytes:
        data, self.held = self.held + chunk, b""
        shown = b""
        while data:
            # Open MPI ends a box with a null byte.
            if self._follows_box and data.startswith(b"\0"):
                data = data[1:]
            self._follows_box = False
            if self._at_line_start and (box := BOX.match(data)):
                shown, data = shown + self._show(box[0], self._repeats(box[0])), data[box.end() :]
                self._follows_box = True
            elif self._at_line_start and self._is_unfinished(data):
                self.held, data = data, b""
            else:
                line, newline, data = data.partition(b"\n")
                shown += self._show(line + newline, self._at_line_start and self._is_late(line))
                self._at_line_start = bool(newline)
        return shown

    def release(self) -> bytes:
        held, self.held = self.held, b""
        self._at_line_start = held.endswith(b"\n")
        return self._show(held, False)

    def _is_unfinished(self, data: bytes) -> bool:
        if data.startswith(RULE):
            return len(data) < LONGEST
        return (
            RULE.startswith(data)
            or self._server.startswith(data)
            or EPOLL.startswith(data)
            or (data.startswith((self._server, EPOLL)) and b"\n" not in data)
        )

    def _repeats(self, box: bytes) -> bool:
        """Return whether our own message reports the same as this box."""
        return bool(KILLED[0].search(box)) or (bool(ENDINGS.search(box)) and self._is_told())

    def _is_late(self, line: bytes) -> bool:
        """Return whether this line adds nothing: a PMIX error, or a warning of libevent.

        The launcher's line adds nothing after the report of the end, and a rank's line after the run.
        """
        is_pmix = line.startswith(self._server) and b"PMIX ERROR" in line
        is_servers = is_pmix or line.startswith(EPOLL)
        return (is_servers and self._is_told()) or bool(self._words.end and PMIX.match(line))

    def _is_told(self) -> bool:
        """Return whether the output already shows how the run ended or why it failed."""
        return self._words.spoken or bool(self._words.end)

    def _show(self, text: bytes, is_dropped: bool) -> bytes:
        if is_dropped:
            self._words.killed.read(text)
            return b""
        self._words.spoken = self._words.spoken or bool(text)
        return self._said.pass_on(text)


class Passage(threading.Thread):
    """A thread that copies one file descriptor to another, but for status lines, to the source's end.

    is_courtesy  after a failed write, read on and drop the bytes; otherwise close the source
    screen       the terminal of the target, if bars are drawn there
    lost         error of the failed write; None before
    """

    def __init__(
        self,
        source: int,
        target: int,
        words: LauncherOutput,
        stream: OutputFilter | Errors,
        is_courtesy: bool = False,
        screen: Screen | None = None,
    ):
        super().__init__(daemon=True)
        self._is_courtesy, self._screen = is_courtesy, screen
        self.lost: OSError | None = None
        self._source, self._target, self._stream = source, target, stream
        self._status = StatusFilter(words.note)
        self._is_waiting = False
        self.start()

    def run(self) -> None:
        with suppress(OSError):  # the target has no reader any more
            while chunk := self._read():
                self._write(self._stream.pass_on(self._status.pass_on(chunk)))
            self._release()
        os.close(self._source)

    def finish(self, seconds: float) -> None:
        """Wait for the end of the source, but at most `seconds` after its last byte.

        A process on another host may never close the source.
        """
        until = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < until:
            self.join(0.02)
            if not self._is_waiting:
                until = time.monotonic() + seconds

    def _read(self) -> bytes:
        self._is_waiting = True
        is_withheld = self._status.held or self._stream.held
        if is_withheld and not select.select([self._source], [], [], PAUSE)[0]:
            self._release()
        chunk = os.read(self._source, 1 << 16)
        self._is_waiting = False
        return chunk

    def _release(self) -> None:
        self._write(self._stream.pass_on(self._status.release()) + self._stream.release())

    def _write(self, data: bytes) -> None:
        if self._screen is None:
            self._write_all(data)
            return
        with self._screen.lock:
            self._write_all(self._screen.place(data))

    def _write_all(self, data: bytes) -> None:
        while data and self.lost is None:
            try:
                data = data[os.write(self._target, data) :]
            except OSError as error:
                self.lost = error
                if not self._is_courtesy:
                    raise
