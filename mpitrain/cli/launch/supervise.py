"""Supervision of a launched job: forwards its output and stop requests, and decides the exit code.

The exit code follows from rank 0's status lines and the launcher's exit code, which arrive for
every launcher. The ranks need no shared folder and no environment variable for it.
"""

import contextlib
import ctypes
import errno
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from mpitrain.cli import NOT_BEGUN, STOPPED, USAGE
from mpitrain.cli.launch.launcher_output import Errors, LauncherOutput, OutputFilter, Passage
from mpitrain.cli.terminal.output import (
    ONE_TERMINAL,
    OUTPUT_TERMINAL,
    TERMINAL,
    Screen,
    columns,
    is_one_terminal,
)
from mpitrain.trace.startup import folder_of

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Requests(list[int]):
    """The stop signals received since construction, in order.

    An ignored HUP (nohup) stays ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        for number in REQUESTS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self.append(number))

    def leave_if_asked(self) -> None:
        """Exit as a stopped run if a signal came before anything was started."""
        if self:
            say(Screen(), NOT_BEGUN)
            sys.exit(STOPPED)


def run(
    line: list[str],
    settings: dict[str, str],
    requests: Requests,
    is_training: bool,
    is_ours: bool = True,
) -> int:
    """Start the command line in a session of its own, and return the exit code of the run.

    The first stop request asks a training run for a checkpoint. The second terminates the launcher,
    and any later one kills it. For another command, the first one terminates the launcher.

    is_ours  the program is an mpitrain command: its ranks know the terminal, and may draw bars
    """
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
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout and process.stderr
    words = LauncherOutput()
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
    passed, reached_run = 0, False
    while (code := process.poll()) is None:
        if len(requests) > passed:
            passed, reached_run = passed + 1, words.began
            if is_training and passed == 1 and words.end:
                continue  # the run has ended: its ranks only have to leave
            _pass_request(screen, process, passed if is_training else passed + 1, words.began)
        elif is_training and passed == 1 and words.began and not reached_run:
            reached_run = True
            # The launcher may have had no ranks when it got the first signal: send it again.
            process.send_signal(signal.SIGUSR1)
        time.sleep(0.02)
    _kill(process.pid)  # a killed launcher may have left ranks behind
    for passage in passages:
        passage.finish(2)
    if is_training and code and words.began:
        from mpitrain.run.checkpoint.directories import tidy

        tidy(Path(words.run))
    killed = words.killed.first()
    if killed and passed < 2 and (words.began or not passed):
        which = (
            f". `mpitrain runs report {shlex.quote(words.run)}` says which one fell silent first"
        )
        say(
            screen,
            f"{killed}"
            + (which if words.began and not killed.is_one else "")
            + (
                ". With --resume=auto the run goes on from its last checkpoint, if it has one"
                if words.began
                else ""
            ),
        )
    if is_training:
        return training_code(screen, words, code, passed, process.pid)
    if passages[0].lost is None:
        return _positive(code)
    if passages[0].lost.errno != errno.EPIPE:
        say(
            screen,
            f"standard output takes no more, and the result is lost: {passages[0].lost.strerror}",
        )
    return _positive(code) or 1


def say(screen: Screen, text: str) -> None:
    """Print a message of `launch` itself, not of a rank.

    It starts on a new line, so it never continues the line of a progress bar.
    """
    line = f"mpitrain launch: {text}"
    with screen.lock:
        print(screen.lead(f"{line}\n".encode()).decode() + line, file=sys.stderr, flush=True)


def _pass_request(screen: Screen, process: subprocess.Popen, which: int, has_begun: bool) -> None:
    if which == 1:
        say(
            screen,
            "asked to stop; the run "
            + ("ends after a step and a checkpoint" if has_begun else "has not begun")
            + ". Ask again to end it at once",
        )
        # Launchers forward USR1 to the ranks, but end them at TERM.
        process.send_signal(signal.SIGUSR1)
    elif which == 2:
        say(screen, "ending it now")
        process.terminate()
    else:
        _kill(process.pid)


def _end_with_parent() -> None:
    """Let the kernel send TERM to the launcher if this process is killed. Runs in the child."""
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

    The launcher's code is not enough: launchers may exit with 0 after losing a host. A request may
    also end a run before it began. It counts as a stop: nothing is lost, and the same command
    starts the run.

    requests  stop requests that were forwarded
    launcher  process of the launcher
    """
    if words.end in ("stopped", "not begun") and code in (0, STOPPED):
        if words.end == "not begun":
            say(screen, NOT_BEGUN)
        return STOPPED
    if words.end == "ended" and code == 0:
        return 0
    if requests == 1 and not words.began and code not in (0, USAGE):
        say(screen, NOT_BEGUN)
        return STOPPED
    if code == 0:
        say(
            screen,
            "the launcher returned 0, but rank 0 did not say that the run ended: a rank may have left, or a host may be lost",
        )
    elif (
        code != USAGE
        and not (requests or words.killed.first())
        and (line := words.failure.last_line(_positive(code), words.run, folder_of(launcher)))
    ):
        say(screen, line)
    return _positive(code) or 1
