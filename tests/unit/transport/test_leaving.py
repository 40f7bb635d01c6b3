"""The end of a rank that MPI keeps, and the shared-memory files of MPICH."""

import mmap
import os
import sys
from pathlib import Path

import pytest

from mpitrain.machine.process import SHARED_MEMORY
from mpitrain.transport.failures.segments import unlink_mapped
from tests.processes import run

HANGS = "import sys, time, types; from mpitrain.transport.failures import grace\n"
ENDS = {
    "barrier": "grace.end_within(0.5); time.sleep(600)",
    "finalize": "sys.modules['mpi4py.MPI'] = types.SimpleNamespace(\n"
    "    Is_finalized=lambda: False, Finalize=lambda: time.sleep(600))\n"
    "grace.leave_within(0.5)",
    "abort": "grace.ABORT_SECONDS = 0.5\n"
    "grace.abort(types.SimpleNamespace(Abort=lambda code: time.sleep(600)), 3)",
}


@pytest.mark.parametrize("call", ENDS)
def test_a_rank_ends_although_mpi_does_not_return(call):
    done = run([sys.executable, "-c", HANGS + ENDS[call]])
    assert done.returncode == 1
    assert ("Timeout" in done.stderr) == (call != "abort")


def test_a_rank_that_leaves_in_time_has_its_own_exit_code():
    done = run([sys.executable, "-c", f"{HANGS}grace.leave_within(600); sys.exit(85)"])
    assert done.returncode == 85 and not done.stderr


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="no shared memory here")
def test_only_mapped_files_of_mpich_lose_their_names():
    names = [f"mpich_shm_{os.getpid()}_{number}" for number in range(2)]
    mapped, other = (Path(SHARED_MEMORY) / name for name in names)
    foreign = Path(SHARED_MEMORY) / f"mpitrain-test-{os.getpid()}"
    try:
        for path in (mapped, other, foreign):
            path.write_bytes(bytes(4096))
        with mapped.open("r+b") as file, foreign.open("r+b") as too:
            views = mmap.mmap(file.fileno(), 0), mmap.mmap(too.fileno(), 0)
        unlink_mapped()
        unlink_mapped()  # A mapping without a name is no reason to fail.
        assert not mapped.exists() and other.exists() and foreign.exists()
        assert views[0][:4] == bytes(4)
    finally:
        for path in (mapped, other, foreign):
            path.unlink(missing_ok=True)
