"""The line that ends a run, past a launcher that forwards nothing more: Open MPI's mpirun, once it ends its ranks.

From Ctrl-C or TERM on, prterun (the program behind `mpirun` since Open MPI 5) forwards no output. It sends its ranks CONT at
once, TERM after 0.25 s and KILL after another 0.25 s. No option of it changes these times (odls_base_default_fns.c).
"""

import os
from contextlib import suppress
from pathlib import Path

SECONDS = 0.25  # between CONT and TERM, and again between TERM and KILL
ADVICE = (
    f"note: mpirun kills its ranks {SECONDS} s after it sends them TERM, which may be before a checkpoint is written; "
    "`mpitrain launch` is needed to stop safely by Ctrl-C or TERM (or send mpirun USR1)"
)


def parent() -> str:
    """The name of the program that started this process; "prterun" or, on another host, "prted" for Open MPI's mpirun."""
    with suppress(OSError):
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    return ""


def say(text: str) -> None:
    """Write a line to the standard output of mpirun itself if it started this process, else to this process's own."""
    if parent() == "prterun":
        with suppress(OSError):
            # Not blocking: a pipe that nobody reads must not hold up the end.
            flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            descriptor = os.open(f"/proc/{os.getppid()}/fd/1", flags)
            try:
                os.write(descriptor, f"{text}\n".encode())
                return
            finally:
                os.close(descriptor)
    print(text, flush=True)
