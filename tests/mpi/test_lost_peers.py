"""Ranks that die under a fault-tolerant Open MPI (ULFM): survivors raise PeerLost, and no call hangs."""

import os
import sys
from pathlib import Path

from tests.laws.lost_peers import CALLS
from tests.processes import run

ROOT = Path(__file__).parents[2]
ULFM = ["--with-ft", "ulfm", "--mca", "coll", "^han,hcoll,portals4"]
# Rank 0 meets one rank after another, each in a job of the two. It survives them all.
PAIRS = """
import os, signal, sys, time
import numpy
from mpi4py import MPI
from mpitrain.errors import PeerLost
from mpitrain.transport.mpi import from_communicator
from tests.laws.lost_peers import CALLS, begin
world, names = MPI.COMM_WORLD, [*CALLS]
pairs = {rank: world.Create_group(world.group.Incl([0, rank]), rank) for rank in range(1, world.size) if world.rank in (0, rank)}
for rank, pair in pairs.items():
    call = CALLS[names[rank - 1]]
    if world.rank > 0:
        go = pair.Irecv(numpy.zeros(1), 0, 7)
        while not go.Test(): time.sleep(0.01)
    else:
        pair.Send(numpy.zeros(1), 1, 7)
    transport = from_communicator(pair)
    rest = begin(call, transport, 1)
    if world.rank > 0: os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try: rest()
    except PeerLost as error: print(names[rank - 1], "lost", [*error.ranks], not transport.job.requests - {None}, flush=True)
os._exit(0)
"""
CHAIN = """
import os, signal, sys
import numpy, mpitrain
from mpitrain.errors import PeerLost
transport = mpitrain.connect()
part = transport.split(0)
if transport.rank == 2: os.kill(os.getpid(), signal.SIGKILL)
try: (part if transport.rank else transport).recv(numpy.zeros(1), transport.rank + 1)
except PeerLost as error: sys.stdout.write(f"rank {transport.rank} lost {[*error.ranks]}\\n"); sys.stdout.flush()
os._exit(0)
"""


def survivors(ranks, code):
    """Run the code on so many ranks of a fault-tolerant MPI; return the printed lines."""
    done = run(
        ["mpirun", *ULFM, "-n", ranks, sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return done.stdout.splitlines(), done.stderr


def test_every_call_raises_when_its_peer_has_died():
    lines, errors = survivors(len(CALLS) + 1, PAIRS)
    assert [line.split()[:2] for line in lines if " lost " in line] == [
        [name, "lost"] for name in CALLS
    ], (lines, errors)


def test_a_rank_that_waits_for_a_survivor_loses_its_peer_too():
    lines, errors = survivors(3, CHAIN)
    assert len([line for line in lines if " lost " in line]) == 2, (lines, errors)
