"""A program that each rank of a tolerant MPI starts before it connects: it names ranks of this host that end meanwhile.

It runs by its path, without the package, since it must start fast. It stops when it reads a byte. The
end of its standard input means that its own rank has ended. The program of the lowest living rank speaks.

    python -I -S siblings.py LAUNCHER LOCAL_SIZE LOCAL_RANK RANK

LAUNCHER is the process number of the ranks' parent.
"""

import os
import select
import socket
import sys
import time
from contextlib import suppress

APPEARING = 5.0
"""Seconds in which the launcher has started all ranks of this host."""
PAUSE = 0.1


def state_of(process: str) -> tuple[str, int]:
    """Return the state letter and the parent of a process; ("X", 0) if it is gone."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/stat") as file:
        state, parent = file.read().rpartition(")")[2].split()[:2]
        return state, int(parent)
    return "X", 0


def rank_of(process: str) -> int:
    with open(f"/proc/{process}/environ", "rb") as file:
        return int(file.read().partition(b"OMPI_COMM_WORLD_RANK=")[2].partition(b"\0")[0])


def watch(launcher: int, local_size: int, local_rank: int, own: int) -> None:
    first, until = own - local_rank, time.monotonic() + APPEARING
    ranks = dict[str, int]()  # of this host, by process
    while True:
        if len(ranks) < local_size:
            for process in filter(str.isdigit, os.listdir("/proc")):
                if process not in ranks and state_of(process)[1] == launcher:
                    with suppress(OSError, ValueError):
                        ranks[process] = rank_of(process)
        living = {rank for process, rank in ranks.items() if state_of(process)[0] not in "ZX"}
        living.add(own)
        lost = {*ranks.values()} - living
        if len(ranks) < local_size and time.monotonic() > until:
            lost |= {*range(first, first + local_size)} - living
        if select.select([0], [], [], 0 if lost else PAUSE)[0]:
            if os.read(0, 1):
                return
            living.discard(own)
            lost = lost if living else {own}
        if lost or own not in living:
            if own == min(living, default=own):
                where = f"ended on {socket.gethostname()} before the ranks were connected"
                for rank in sorted(lost):
                    print(f"rank {rank}: {where}", file=sys.stderr)
            return


if __name__ == "__main__":
    watch(*map(int, sys.argv[1:]))
