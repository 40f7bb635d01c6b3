"""The state of a process of this host: running, stopped by a signal, or gone."""

import contextlib
import os
import socket
from typing import NamedTuple


class ProcessId(NamedTuple):
    """Identity of a process, which no later process has.

    number     its PID
    started    ticks from the boot to its start; PIDs are used again
    namespace  that of its PID, so that containers of one host name are not mixed up
    host       name of its host
    """

    number: int
    started: int
    namespace: str
    host: str


def own_id() -> ProcessId:
    """Return the identity of this process."""
    _, started = _status(os.getpid())
    return ProcessId(os.getpid(), started, _namespace(), socket.gethostname())


def process_state(process: ProcessId) -> str:
    """Return "running", "stopped", "gone", or "" if this process cannot see that one."""
    own = _namespace()
    if not own or (process.namespace, process.host) != (own, socket.gethostname()):
        return ""
    state, started = _status(process.number)
    if started != process.started or state in "ZX":
        return "gone"
    return "stopped" if state in "Tt" else "running"


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _status(number: int) -> tuple[str, int]:
    """Return the state letter and the start of a process; ("X", -1) if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{number}/stat") as file:
        # The name of the program may contain spaces and parentheses.
        fields = file.read().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return "X", -1
