"""What doctor asks of the MPI library, and what a caller's communicator may rely on."""

import os

import numpy as np
import pytest

from mpitrain.collectives.group import bind
from mpitrain.config import parse, with_settings
from mpitrain.run.build import build
from mpitrain.transport.library import cuda_awareness, library
from mpitrain.transport.mpi import connect, from_communicator
from tests.laws.transport import laws_of
from tests.laws.windows import TINY, WindowLaws


@pytest.mark.parametrize("mpi_ranks", [1])
def test_the_library_names_itself_and_says_whether_it_reads_gpu_memory(mpi_ranks):
    connect()
    facts = library()
    assert "MPI" in facts.version
    assert facts.standard >= (3, 1)
    assert facts.thread_level in ("funneled", "serialized", "multiple")
    assert os.path.exists(facts.path)
    awareness = cuda_awareness(facts.path, {})
    assert awareness.how in ("MPIX_Query_cuda_support", "MPIX_GPU_query_support")
    assert awareness.cuda is False  # neither wheel is CUDA-aware


@pytest.mark.parametrize("mpi_ranks", [2])
def test_a_communicator_handed_in_keeps_its_own_messages(mpi_ranks):
    from mpi4py import MPI

    theirs = MPI.COMM_WORLD
    transport = from_communicator(theirs)
    other = 1 - transport.rank
    theirs_send = theirs.isend("hello", other, tag=0)
    ours = np.zeros(2)
    transport.exchange(np.full(2, transport.rank + 1.0), other, ours, other, tag=0)
    assert np.array_equal(ours, np.full(2, other + 1.0))
    assert theirs.recv(source=other, tag=0) == "hello"
    theirs_send.wait()


@pytest.mark.parametrize("mpi_ranks", [2])
def test_what_is_closed_has_given_back_its_communicators_and_windows(mpi_ranks):
    from mpi4py import MPI

    for _ in range(20):
        transport = from_communicator(MPI.COMM_WORLD)
        part = transport.split(0)
        array = part.allocate(1001, "float64")
        array[:] = transport.rank + 1
        bind(part, array, algorithm="shared").run()
        copied = np.full(1001, transport.rank + 1.0)
        bind(transport, copied, algorithm="shared").run()
        assert np.array_equal(array, np.full(1001, 3)) and np.array_equal(copied, array)
        comms = [transport.comm, transport._host.comm, part.comm, part._host.comm]
        assert len(transport.windows) == 2
        part.close()
        assert comms[2] == MPI.COMM_NULL != comms[3], (
            "the window that an array lies in keeps its communicator"
        )
        assert transport.windows.locate(array, transport.rank) is not None
        bind(transport, copied, algorithm="shared").run()
        assert len(transport.windows) == 2, "its own window goes on, and is used again"
        transport.close()
        assert len(transport.windows) == 0 and all(comm == MPI.COMM_NULL for comm in comms)


@pytest.mark.parametrize("mpi_ranks", [2])
def test_a_job_that_is_closed_has_given_back_its_communicators(mpi_ranks):
    from mpi4py import MPI

    root = from_communicator(MPI.COMM_WORLD)
    job = build(root, parse(with_settings({}, [*TINY, "batch.size=2", "replication.zero=1"])))
    job.trainer.step(0, *job.trainer.replica.batch(job.data, 0))
    own = [root.windows, *root.windows.parts]
    comms = [part.comm for part in own[1:]] + [part._host.comm for part in own[1:] if part._host]
    assert len(own) == 7 and len(comms) > 6, (
        "its own part of the world, one along each of three axes, and the two of ZeRO"
    )
    job.close()
    assert (
        all(comm == MPI.COMM_NULL for comm in comms)
        and not root.windows.parts
        and not len(root.windows)
    )
    root.close()


@pytest.mark.parametrize("mpi_ranks", [2, 3])
@pytest.mark.parametrize("law", laws_of(WindowLaws))
def test_mpi_windows_obey(law, mpi_ranks):
    getattr(WindowLaws(), law)(connect())
