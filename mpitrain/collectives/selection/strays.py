"""Ends the processes that a child has left behind, also those that left its session.

The kernel gives the children of a process that has ended to its nearest ancestor that is a subreaper
(prctl(2)). This process becomes one.
"""

import ctypes
import os
import signal
import time
from contextlib import suppress

CHILD_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""
SECONDS = 1.0
"""Time in which a file may start processes faster than they are ended."""


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose parent has ended."""
    ctypes.CDLL(None).prctl(CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> dict[int, int]:
    """Return {process: its session} of the children of this process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The name of the program, in parentheses, may contain spaces.
                _, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
                if int(parent) == os.getpid():
                    found[int(name)] = int(session)
    return found


def end_strays(before: dict[int, int]) -> None:
    """Kill the adopted children, and their children, until there are none.

    A child that this process starts itself stays in its session or was there before.

    before  `children` before the child was started
    """
    own, end = os.getsid(0), time.monotonic() + SECONDS
    while strays := [
        pid for pid, session in children().items() if pid not in before and session != own
    ]:
        for pid in strays:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if time.monotonic() > end:
            return
