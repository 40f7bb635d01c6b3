"""Supervision of a launched job: forwards its output and stop requests, and decides the exit code.

The exit code follows from rank 0's status lines and the launcher's exit code. Both arrive here by
every launcher, so the ranks need no shared folder and no environment variable for it.
"""

import contextlib
import ctypes
import errno
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from mpitrain.cli import NOT_BEGUN, STOPPED, USAGE
from mpitrain.cli.launch.failed import KILLED, LOST_HOST, Failure, KilledRanks
from mpitrain.cli.terminal.output import (
    ONE_TERMINAL,
    OUTPUT_TERMINAL,
    TERMINAL,
    Screen,
    columns,
    is_one_terminal,
)
from mpitrain.cli.terminal.stop_requests import StatusFilter
from mpitrain.files import remove
from mpitrain.trace.startup import folder_of

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
STOPS = re.compile(rb"Exit code: +%d\n" % STOPPED)
ENDINGS = re.compile(
    rb"processes exited with non-zero status|MPI_ABORT was invoked|exited due to process rank"
)


class LauncherOutput:
    """What the output of a run has shown so far.

    began    whether the run has a run directory
    end      event of the status line that closed the run: "ended", "stopped" or "not begun"; ""
             before
    run      run directory; "" before there is one
    left     number of ranks whose program of the user has ended by itself
    spoken   whether any byte was shown on standard error
    lost     the host of which Open MPI says that it is lost; "" before
    killed   the ranks that a signal ended
    failure  the first failure that a rank reported
    """

    def __init__(self, hosts: int = 1) -> None:
        """hosts: the number of them, as far as `launch` knows."""
        self.hosts = hosts
        self.began = self.spoken = False
        self.end, self.run, self.lost, self.left = "", "", "", 0
        self.killed, self.failure = KilledRanks(), Failure()

    @property
    def loss(self) -> str:
        """What may have kept ranks from saying that they have ended."""
        if self.lost:
            return f"host {self.lost} is lost"
        return "a rank may have left, or a host may be lost"

    def note(self, event: str, run_dir: str) -> None:
        if event == "began":
            self.began, self.run = True, run_dir
        elif event == "left":
            self.left += 1
        elif event == "aborts":
            self.failure.aborted = self.failure.aborted or time.monotonic()
        elif not self.end:
            self.end = event


class OutputFilter:
    """A filter for standard output that removes only status lines."""

    held = b""

    def __init__(self, words: LauncherOutput, has_errors: bool = False):
        """words       the state that the filter brings up to date
        has_errors  whether ranks report failures here, as they do on standard error
        """
        self._words, self._recent, self._has_errors = words, b"", has_errors

    def pass_on(self, chunk: bytes) -> bytes:
        """Return the bytes to show now."""
        self._recent += chunk
        lines = self._recent[: self._recent.rfind(b"\n") + 1]
        self._words.killed.read(lines)
        if lost := LOST_HOST.search(lines):
            self._words.lost = lost[1].decode(errors="replace")
        if self._has_errors:
            self._words.failure.read(lines)
        self._recent = self._recent[-LONGEST:]
        return chunk

    def release(self) -> bytes:
        """Return the bytes held back, to be shown after all."""
        return b""


class Errors:
    """A filter for standard error that removes the launcher's messages if they repeat one of ours.

    server  prefix of the launcher's own lines
    held    bytes held back, which may become such a message
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
        """Return whether this box says nothing new, or one of our messages says the same."""
        is_stop = bool(STOPS.search(box))  # The program has saved a checkpoint.
        is_end = bool(ENDINGS.search(box))
        return bool(KILLED[0].search(box)) or (is_end and (is_stop or self._is_told()))

    def _is_late(self, line: bytes) -> bool:
        """Return whether this line is a PMIX error or a libevent warning that says nothing new.

        A line of the launcher says nothing new once anything was shown or the end was reported; a
        line of a rank does not once the end was reported.
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
            self._words.failure.read_box(text)
            return b""
        self._words.spoken = self._words.spoken or bool(text)
        return self._said.pass_on(text)


class Passage(threading.Thread):
    """A thread that copies one file descriptor to another, up to the end of the source.

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


ABORTING = 15.0
"""Seconds in which a launcher must end after a rank has ended all of them."""
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Requests(list[int]):
    """The stop signals received since construction, in order.

    HUP stays ignored if it was (nohup).
    """

    def __init__(self) -> None:
        super().__init__()
        for number in REQUESTS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self.append(number))

    def leave_if_asked(self) -> None:
        """Exit as a stopped run does, if a signal came before anything was started."""
        if self:
            say(Screen(), NOT_BEGUN)
            sys.exit(STOPPED)


def run(
    line: list[str],
    settings: dict[str, str],
    requests: Requests,
    is_training: bool,
    is_ours: bool = True,
    last_line: str = "",
    words: LauncherOutput | None = None,
    leave: int = 0,
) -> int:
    """Start the command line in a session of its own; return the exit code of the run.

    The first stop signal asks a training run for a checkpoint; another command's launcher is
    terminated by it. The second one terminates the launcher, and any later one kills it. The ranks of
    a user's program get each USR1.

    is_ours    whether the program is an mpitrain command, whose ranks may draw bars on the terminal
    last_line  what a program that talks reads at the end of standard input; "": it does not talk
    words      receives what the output shows
    leave      ranks of a user's program without whose end by itself the launcher's 0 means nothing
    """
    words = words or LauncherOutput()
    environment, screen = {**os.environ, **settings}, Screen()
    # These screens show the ranks' standard output and standard error, if they draw bars.
    shown: list[Screen | None] = [None, None]
    # srun would not forward a bar before its line ends, so ranks under srun print lines instead.
    if is_ours and sys.stderr.isatty() and line[0] != "srun":
        environment[TERMINAL], shown[1] = str(columns()), screen
        if is_one_terminal():
            environment[ONE_TERMINAL], shown[0] = "1", screen
    environment[OUTPUT_TERMINAL] = str(columns(1) if sys.stdout.isatty() else 0)
    process = subprocess.Popen(
        line,
        env=environment,
        start_new_session=True,
        preexec_fn=_end_with_parent,
        stdin=subprocess.PIPE if last_line else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout and process.stderr
    with suppress(OSError):
        remove(folder_of(process.pid))  # of an earlier launcher with the same number
    if process.stdin:
        threading.Thread(target=_forward, args=(process.stdin, last_line), daemon=True).start()
    server = f"[{socket.gethostname()}:{process.pid:05d}]".encode()
    passages = [
        Passage(os.dup(source.fileno()), target, words, stream, is_training, shown[target - 1])
        for source, target, stream in (
            (process.stdout, 1, OutputFilter(words)),
            (process.stderr, 2, Errors(words, server)),
        )
    ]
    process.stdout.close()
    process.stderr.close()
    warned, passed, reached_run, has_ended, has_hung = 0, 0, False, False, False
    while (code := process.poll()) is None:
        ends = [number for number in requests if is_ours or number != signal.SIGUSR1]
        if len(requests) - len(ends) > warned:
            warned += 1
            process.send_signal(signal.SIGUSR1)  # The program itself says what this asks for.
        if len(ends) > passed:
            passed, reached_run = passed + 1, words.began
            if is_training and passed == 1 and words.end:
                continue  # the run has ended: its ranks only have to leave
            _pass_request(screen, process, passed if is_training else passed + 1, words.began)
        elif is_training and passed == 1 and words.began and not reached_run:
            reached_run = True
            # The launcher may have had no ranks when it got the first signal: send it again.
            process.send_signal(signal.SIGUSR1)
        if words.failure.too_early and not has_ended:
            has_ended = True
            process.terminate()
        if words.failure.aborted and time.monotonic() > words.failure.aborted + ABORTING:
            # mpirun waits for the daemon of a host without power.
            _kill(process.pid)
            has_hung = True
        time.sleep(0.02)
    _kill(process.pid)  # a killed launcher may have left ranks behind
    for passage in passages:
        passage.finish(2)
    if is_training and code and words.began:
        from mpitrain.run.checkpoint.manifest import tidy

        tidy(Path(words.run))
    killed = words.killed.first()
    if is_training and "--with-ft" in line and words.end in ("ended", "stopped"):
        killed, code = None, STOPPED if words.end == "stopped" else 0  # The others went on.
    if killed and passed < 2 and (words.began or not passed):
        text = str(killed)
        if words.began and not killed.is_one:
            report = f"mpitrain runs report {shlex.quote(words.run)}"
            text += f". `{report}` says which one fell silent first"
        if words.end:
            text += f". The run had {words.end} before: nothing is lost"
        elif words.began:
            text += ". With --resume=auto the run goes on from its last checkpoint, if it has one"
        say(screen, text)
    if is_training:
        return training_code(screen, words, code, passed, process.pid)
    if has_hung:
        why = words.failure.report or "a rank has ended all"
        cause = ": a host may be lost" if words.hosts > 1 else f" within {ABORTING:.0f} s"
        say(screen, f"{why}, but the launcher did not end{cause}")
        return 1
    if code == 0 and words.left < leave:
        ended = f"the program ended on {words.left} of {leave} ranks"
        say(screen, f"the launcher returned 0, but {ended}: {words.loss}")
        return 1
    # What the program has said on standard error may be no reason.
    is_explained = is_ours or killed or passed or words.failure.report
    if code != STOPPED and words.failure.exited and not is_explained:
        say(screen, words.failure.exited)
    lost = passages[0].lost
    if lost and lost.errno != errno.EPIPE:
        say(screen, f"standard output takes no more, and the result is lost: {lost.strerror}")
    return _positive(code) or int(lost is not None)


def say(screen: Screen, text: str) -> None:
    """Print a message of `launch` itself, not of a rank.

    It is printed on a new line, so that it does not continue a progress bar.
    """
    line = f"mpitrain launch: {text}"
    with screen.lock:
        print(screen.lead(f"{line}\n".encode()).decode() + line, file=sys.stderr, flush=True)


def _pass_request(screen: Screen, process: subprocess.Popen, which: int, has_begun: bool) -> None:
    if which == 1:
        does = "ends after a step and a checkpoint" if has_begun else "has not begun"
        say(screen, f"asked to stop; the run {does}. Ask again to end it at once")
        # Launchers forward USR1 to the ranks, but end them at TERM.
        process.send_signal(signal.SIGUSR1)
    elif which == 2:
        say(screen, "ending it now")
        process.terminate()
    else:
        _kill(process.pid)


def _forward(target: IO[bytes], last_line: str) -> None:
    """Forward standard input. Open MPI forwards no end, and nothing from a terminal of another session."""
    with contextlib.suppress(OSError), target:
        while data := os.read(0, 1 << 16):
            target.write(data)
            target.flush()
        target.write(f"\n{last_line}\n".encode())


def _end_with_parent() -> None:
    """In the child: let the kernel send TERM to the launcher if the parent is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG.


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _positive(code: int) -> int:
    return code if code >= 0 else 128 - code


def training_code(
    screen: Screen, words: LauncherOutput, code: int, requests: int, launcher: int
) -> int:
    """Return the exit code of a training run: 0 only if rank 0 reported its end, 85 if it stopped.

    The launcher's code is not enough: launchers may exit with 0 after losing a host, and with another
    code when the user ended the ranks of a run that had reported its end. If a stop
    signal ended the run before it began, this counts as a stop: nothing is lost, and the same
    command starts the run.

    requests  number of stop signals that were forwarded
    launcher  process number of the launcher
    """
    if words.end in ("stopped", "not begun") and (requests or code in (0, STOPPED)):
        if words.end == "not begun":
            say(screen, NOT_BEGUN)
        return STOPPED
    if words.end == "ended" and (requests or code == 0):
        return 0
    if requests == 1 and not words.began and code not in (0, USAGE):
        say(screen, NOT_BEGUN)
        return STOPPED
    line = ""
    if code == 0:
        line = f"the launcher returned 0, but rank 0 did not say that the run ended: {words.loss}"
    elif code != USAGE and not (requests or words.killed.first()):
        line = words.failure.last_line(_positive(code), words.run, folder_of(launcher))
    if line:
        say(screen, line)
    return _positive(code) or 1
