"""Shared-memory files of MPICH: unlinked as soon as all ranks have mapped them.

MPICH unlinks them only in MPI_Finalize, so a job that dies would leave them in /dev/shm. A mapping
outlives the name of its file. Open MPI opens its files later, by name, and its mpirun removes them.
"""

import os
import re
from contextlib import suppress

from mpitrain.machine.process import SHARED_MEMORY

MPICH = re.compile(rf"{re.escape(SHARED_MEMORY)}/mpich_shm_\w+", re.ASCII)


def unlink_mapped() -> None:
    """Remove the names of the MPICH files that this process has mapped; one rank of a host calls it.

    All ranks of the host must have mapped them, which MPI_Init does.
    """
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.rstrip("\n").partition("/")[2] for line in maps}
        for path in paths:
            if MPICH.fullmatch(f"/{path}"):
                os.unlink(f"/{path}")
