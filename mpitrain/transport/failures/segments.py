"""Shared-memory files of MPI libraries: unlinked as soon as all ranks have mapped them.

MPICH unlinks them only in MPI_Finalize, so a job that dies would leave them in /dev/shm. A mapping
outlives the name of its file. Open MPI opens its files later, by name, and its mpirun removes them.
A rank without mpirun is alone, and Open MPI would leave its file there.
"""

import os
import re
from contextlib import suppress

from mpitrain.machine.process import SHARED_MEMORY

MPICH = r"mpich_shm_\w+"
OPEN_MPI = r"sm_segment\.[\w.-]+\.{user}\.[0-9a-f]+\.0"


def unlink_mapped(is_alone: bool) -> None:
    """Remove the names of MPI's files that this process has mapped; one rank of a host calls it.

    All ranks of the host must have mapped them, which MPI_Init does.

    is_alone  the job has one rank: files of Open MPI are removed too
    """
    files = f"{MPICH}|{OPEN_MPI.format(user=os.geteuid())}" if is_alone else MPICH
    names = re.compile(f"{re.escape(SHARED_MEMORY)}/({files})", re.ASCII)
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.rstrip("\n").partition("/")[2] for line in maps}
        for path in paths:
            if names.fullmatch(f"/{path}"):
                os.unlink(f"/{path}")
