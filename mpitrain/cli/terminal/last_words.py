"""The last line of a run, printed when Open MPI's mpirun ends its ranks and forwards no output.

From Ctrl-C or TERM on, prterun (the program behind `mpirun` since Open MPI 5) forwards no output.
It sends its ranks CONT at once, TERM after 0.25 s and KILL after another 0.25 s. None of its
options changes these times (odls_base_default_fns.c).
"""

import os
from contextlib import suppress
from pathlib import Path

SECONDS = 0.25
"""Seconds between CONT and TERM, and again between TERM and KILL."""
ADVICE = (
    f"note: mpirun kills its ranks {SECONDS} s after it sends them TERM, which may be before a checkpoint is written; "
    "`mpitrain launch` is needed to stop safely by Ctrl-C or TERM (or send mpirun USR1)"
)


def parent() -> str:
    """Return the name of the program that started this process, or "" if it is unknown.

    For Open MPI's mpirun it is "prterun", and "prted" on other hosts.
    """
    with suppress(OSError):
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    return ""


def say(text: str) -> None:
    """Write a line to mpirun's own standard output; print it if mpirun is not the parent."""
    if parent() == "prterun":
        with suppress(OSError):
            # The write does not block: a pipe without a reader must not delay the exit.
            flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            descriptor = os.open(f"/proc/{os.getppid()}/fd/1", flags)
            try:
                os.write(descriptor, f"{text}\n".encode())
                return
            finally:
                os.close(descriptor)
    print(text, flush=True)
