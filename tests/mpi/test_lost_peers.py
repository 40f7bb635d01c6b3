"""Ranks that die under a fault-tolerant Open MPI (ULFM): survivors raise PeerLost, and no call hangs."""

import os
import sys
from pathlib import Path

import pytest

from tests.laws.lost_peers import CALLS, OUTLIVED, OUTLIVING, SPARES
from tests.processes import run

ROOT = Path(__file__).parents[2]
ULFM = ["--with-ft", "ulfm", "--mca", "coll", "^han,hcoll,portals4"]
VICTIMS = 3
# Rank 0 survives the others. Each call has a job of its own, with one of the victims. A victim dies while rank 0 is in the
# first call that needs it; the other calls need a rank that is dead already.
PAIRS = f"""
import os, signal, sys, time
import numpy
from mpi4py import MPI
from mpitrain.errors import PeerLost
from mpitrain.transport.mpi import from_communicator
from tests.laws.lost_peers import CALLS, begin
world, calls = MPI.COMM_WORLD, []
for number, name in enumerate(CALLS):
    victim = 1 + number % {VICTIMS}
    if world.rank in (0, victim):
        transport = from_communicator(world.Create_group(world.group.Incl([0, victim]), number))
        calls.append((victim, name, transport, begin(CALLS[name], transport, 1)))
go = world.Irecv(numpy.zeros(1), 0, 7) if world.rank else None
while go:
    time.sleep(0.01)
    if go.Test(): time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)
dying = set()
for victim, name, transport, rest in calls:
    if victim not in dying: world.Send(numpy.zeros(1), victim, 7)
    dying.add(victim)
    try: rest()
    except PeerLost as error: print(name, "lost", [*error.ranks], flush=True)
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

OUTLIVE = """
import atexit, os, signal, sys
import mpitrain
from mpitrain.transport.failures import leave_within
from tests.laws.lost_peers import outlive
transport = mpitrain.connect()
first = transport.number
seen = outlive(transport, lambda: os.kill(os.getpid(), signal.SIGKILL))
atexit.register(lambda: sys.stdout.write(f"{first}: {seen}" + ", finalized" * transport.MPI.Is_finalized() + "\\n"))
leave_within(60)
"""


def survivors(ranks, code, *options):
    """Run the code on so many ranks of a fault-tolerant MPI; return the printed lines."""
    if "Open MPI" not in run(["mpirun", "--version"]).stdout:
        pytest.skip("only Open MPI has ULFM")
    done = run(
        ["mpirun", *ULFM, "-n", ranks, sys.executable, *options, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return done.stdout.splitlines(), done.stderr


def test_every_call_raises_when_its_peer_has_died():
    lines, errors = survivors(1 + VICTIMS, PAIRS)
    assert [line.split()[:2] for line in lines if " lost " in line] == [
        [name, "lost"] for name in CALLS
    ], (lines, errors)


def test_a_rank_that_waits_for_a_survivor_loses_its_peer_too():
    lines, errors = survivors(3, CHAIN)
    assert len([line for line in lines if " lost " in line]) == 2, (lines, errors)


def test_the_living_ranks_go_on_after_each_loss_and_exit_without_finalize():
    lines, errors = survivors(OUTLIVING, OUTLIVE, f"-Xmpitrain_spares={SPARES}")
    assert sorted(lines) == [f"{rank}: {rows}" for rank, rows in OUTLIVED.items()], (lines, errors)
