"""Status lines: what a rank tells `launch` beside its output.

A status line is an element of a JSON text sequence (RFC 7464): record separator, object, line
break. It is written to standard output, the only channel that every launcher forwards from every
host. `launch` requests status lines by an option of the Python interpreter, because command lines
reach all hosts.
"""

import atexit
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

FLAG = "mpitrain_launched"
"""The value of Python's option -X on every rank that `launch` starts."""
Event = Literal["began", "ended", "stopped", "not begun", "left", "aborts"]


def is_launched() -> bool:
    """Return whether `launch` started this rank: it can stop a run without ending its launcher."""
    return FLAG in sys._xoptions


def status(event: Event, run_dir: str = "") -> str:
    """Return the status line of an event, or "" if no `launch` reads it.

    began      the run directory exists; `run_dir` is its path
    ended      all steps are done, and the replicas are bitwise equal
    stopped    the run stopped on request, after a checkpoint
    not begun  the run stopped on request, before it had a run directory
    left       the program of a user has ended by itself on this rank
    aborts     it has failed on this rank, which ends all ranks now
    """
    if not is_launched():
        return ""
    return f"\x1e{json.dumps({'mpitrain': event, 'run_dir': run_dir})}\n"


class ProgramEnd:
    """Tells `launch` once how the program of a user ends on this rank.

    `os._exit` with an exit code of `successes` says so, too, and a program that puts another one in its
    place. The line goes to the standard output of now: the program may close it, or redirect it.
    """

    def __init__(self, successes: tuple[int | None, ...]):
        self._own, self._is_told = os.getpid(), not is_launched()
        self._output = -1 if self._is_told else os.dup(1)
        atexit.register(self.tell, "aborts")  # The last of all that runs at the exit.

        def telling(leave: Callable[..., Any], is_end: Callable[..., bool]) -> Callable[..., Any]:
            def leave_told(*arguments: Any, **named: Any) -> Any:
                if is_end(*arguments, **named):
                    self.tell("left")
                return leave(*arguments, **named)

            return leave_told

        os._exit = telling(os._exit, lambda status=None: status in successes)
        for name in ("execv", "execve"):
            setattr(os, name, telling(getattr(os, name), lambda *_, **__: True))

    def tell(self, event: Event) -> None:
        # A child of this rank, as a worker of a DataLoader, is not the program.
        if not self._is_told and os.getpid() == self._own:
            self._is_told = True
            with suppress(OSError):
                os.write(self._output, status(event).encode())
