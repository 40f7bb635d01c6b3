"""One started job: its output passed on, requests to stop passed on, and the exit code of the whole.

The code is decided from what reaches this process however the ranks were started: rank 0's words on standard output and the
launcher's exit code. No folder need be shared with the ranks, and no variable need reach them.
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

from mpitrain.cli import ENDED, LAUNCHED, NOT_BEGUN, STOPPED, STOPPED_AT, USAGE
from mpitrain.cli.launch.launcher_output import Errors, LauncherOutput, Output, Passage
from mpitrain.cli.terminal.screen import (
    ONE_TERMINAL,
    OUTPUT_TERMINAL,
    TERMINAL,
    Screen,
    columns,
    is_one_terminal,
)

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Requests(list[int]):
    """The signals that asked for an end, in order, from the making of this list on. An ignored HUP (nohup) stays ignored."""

    def __init__(self) -> None:
        super().__init__()
        for number in REQUESTS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self.append(number))

    def leave_if_asked(self) -> None:
        """End here, as a run that was stopped, if somebody asked before anything was started."""
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
    """Start the line in a session of its own, and return the exit code of the run.

    The first request asks a training run for a checkpoint; the next one tells the launcher to end, and any after that kills
    it. Of any other command the first tells the launcher to end.

    is_ours  the ranks are told of the terminal; the output of other programs passes as it is
    """
    environment, screen = {**os.environ, **settings, LAUNCHED: "1"}, Screen()
    shown: list[Screen | None] = [
        None,
        None,
    ]  # on which the ranks' standard output and standard error end
    if (
        is_ours and sys.stderr.isatty() and line[0] != "srun"
    ):  # which holds a bar until its line ends: it gets lines instead
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
        Passage(os.dup(process.stdout.fileno()), 1, Output(words), is_training, shown[0]),
        Passage(os.dup(process.stderr.fileno()), 2, Errors(words, server), is_training, shown[1]),
    ]
    process.stdout.close()
    process.stderr.close()
    told, told_the_run = 0, False
    while (code := process.poll()) is None:
        if len(requests) > told:
            told, told_the_run = told + 1, words.began
            _pass_request(screen, process, told if is_training else told + 1, words.began)
        elif is_training and told == 1 and words.began and not told_the_run:
            told_the_run = True
            process.send_signal(
                signal.SIGUSR1
            )  # a launcher may have had no ranks yet when it got the first
        time.sleep(0.02)
    _kill(process.pid)  # a launcher that was killed may have left ranks behind
    for passage in passages:
        passage.finish(2)
    if words.killed and told < 2 and (words.began or not told):
        which = f". `mpitrain report {shlex.quote(words.run)}` says which one fell silent first"
        say(
            screen,
            f"{words.killed}"
            + (which if words.began and not words.killed.is_one else "")
            + (
                ". With --resume=auto the run goes on from its last checkpoint, if it has one"
                if words.began
                else ""
            ),
        )
    if is_training:
        return training_code(screen, words, code, told)
    if passages[0].lost is None:
        return _positive(code)
    if passages[0].lost.errno != errno.EPIPE:
        say(
            screen,
            f"standard output takes no more, and the result is lost: {passages[0].lost.strerror}",
        )
    return _positive(code) or 1


def say(screen: Screen, text: str) -> None:
    """One line of launch's own, which does not go on in the line of a bar."""
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
        process.send_signal(
            signal.SIGUSR1
        )  # launchers forward it to the ranks; TERM would end them
    elif which == 2:
        say(screen, "ending it now")
        process.terminate()
    else:
        _kill(process.pid)


def _end_with_parent() -> None:
    """Runs in the child: have the kernel send TERM to the launcher if this process is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _positive(code: int) -> int:
    return code if code >= 0 else 128 - code


def training_code(screen: Screen, words: LauncherOutput, code: int, asked: int) -> int:
    """0 only for a run that said it ended, 85 only for one that was stopped: launchers exit 0 after losing a host.

    asked  requests that were passed on; one that ended a run before it began stops it too: nothing is lost, and the same
           command starts it again
    """
    if words.closing in (STOPPED_AT, NOT_BEGUN) and code in (0, STOPPED):
        return STOPPED
    if words.closing == ENDED and code == 0:
        return 0
    if asked == 1 and not words.began and code not in (0, USAGE):
        if words.closing is None:
            say(screen, NOT_BEGUN)
        return STOPPED
    if code == 0:
        say(
            screen,
            "the launcher returned 0, but rank 0 did not say that the run ended: a host may be lost",
        )
    return _positive(code) or 1
