"""The end of a rank that MPI keeps, and the shared-memory files of MPI."""

import mmap
import os
import sys
from pathlib import Path

import pytest

from mpitrain.machine.process import SHARED_MEMORY
from mpitrain.transport.failures import unlink_mapped
from tests.processes import run

pytestmark = pytest.mark.slow

HANGS = "import sys, time, types; from mpitrain.transport import failures\n"
ENDS = {
    "barrier": "failures.leave_within(0.5); time.sleep(600)",
    "finalize": "sys.modules['mpi4py.MPI'] = types.SimpleNamespace(\n"
    "    Is_finalized=lambda: False, Finalize=lambda: time.sleep(600))\n"
    "failures.leave_within(0.5)",
    "abort": "failures.ABORT_SECONDS = 0.5\n"
    "failures.end_job(types.SimpleNamespace(Abort=lambda code: time.sleep(600)), 3)",
}


@pytest.mark.parametrize("call", ENDS)
def test_a_rank_ends_although_mpi_does_not_return(call):
    done = run([sys.executable, "-c", HANGS + ENDS[call]])
    assert done.returncode == 1
    assert ("Timeout" in done.stderr) == (call != "abort")


def test_a_rank_that_leaves_in_time_has_its_own_exit_code():
    done = run([sys.executable, "-c", f"{HANGS}failures.leave_within(600); sys.exit(85)"])
    assert done.returncode == 85 and not done.stderr


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="no shared memory here")
@pytest.mark.parametrize("is_alone", (False, True))
def test_only_mapped_files_of_mpi_lose_their_names(is_alone):
    """A rank of several leaves Open MPI's file: the others open it by name."""
    shared, own = Path(SHARED_MEMORY), os.getpid()
    named = f"sm_segment.host-1.{os.geteuid()}"
    mpich, open_mpi = shared / f"mpich_shm_{own}_0", shared / f"{named}.{own:x}.0"
    foreign, unmapped = shared / f"mpitrain-test-{own}", shared / f"{named}.{own:x}1.0"
    link = shared / f"{named}.{own:x}2.0"
    paths = (mpich, open_mpi, foreign, unmapped)
    try:
        for path in paths:
            path.write_bytes(bytes(4096))
        views = []
        for path in paths[:3]:
            with path.open("r+b") as file:
                views.append(mmap.mmap(file.fileno(), 0))
        link.symlink_to(foreign)
        unlink_mapped(is_alone)
        unlink_mapped(is_alone)  # A mapping without a name is no reason to fail.
        there = [path.exists() for path in (*paths, link)]
        assert there == [False, not is_alone, True, True, True]
        assert all(view[:4] == bytes(4) for view in views)
    finally:
        for path in (*paths, link):
            path.unlink(missing_ok=True)
