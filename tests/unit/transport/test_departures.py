"""Waits that cannot end once some ranks have ended: requests, collective calls, and several requests at once."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.transport.failures import Guard, MpiJob, needs
from mpitrain.transport.mpi import MpiTransport, SendRequest
from mpitrain.transport.native import bind_native_all_reduce

MEMBERS = (0, 4, 5)
"""Ranks of a split transport in the whole job; this one is rank 0."""


@pytest.fixture
def job():
    return MpiJob(SimpleNamespace(ERR_UNKNOWN=0, THREAD_MULTIPLE=3, Query_thread=lambda: 2))


def request(job, peer):
    transport = SimpleNamespace(job=job, members=MEMBERS, rank=0)
    return SendRequest(transport, None, "recv", peer)


@pytest.mark.parametrize(
    "peer, left, needed",
    [
        (1, {4}, True),
        (1, {1, 5}, False),
        (-1, {4}, False),
        (-1, {4, 5}, True),
        (None, {5}, True),
        (None, {1, 2, 3}, False),
    ],
)
def test_a_request_needs_its_peer_or_all_ranks_of_a_collective(peer, left, needed, job):
    assert needs(request(job, peer), left) == needed


def test_a_wait_for_progress_needs_the_ranks_of_all_requests(job):
    assert job.unending({4}) is None
    stuck = request(job, 1)
    assert job.unending({4}) is stuck and job.unending({5}) is None
    request(job, 2)
    assert job.unending({4}) is None


def test_a_collective_call_needs_its_ranks_until_it_returns(job):
    guard = Guard(SimpleNamespace(MPI=SimpleNamespace(Exception=OSError)), None, "", MEMBERS, "")
    assert needs(guard, {5}) and not needs(guard, {2})
    guard.awaits = ()
    assert not needs(guard, {5})
    guard._job.call = None
    with guard:
        assert guard._job.call is guard
    assert guard._job.call is None


def test_a_started_library_all_reduce_goes_on_while_one_rank_computes(job):
    """Ranks may have the sum and end, while one computes and another waits for its messages."""
    transport, array = MpiTransport.__new__(MpiTransport), np.ones(1)
    transport.MPI = SimpleNamespace(IN_PLACE=None, SUM=None)
    transport.job, transport.comm = job, SimpleNamespace(Iallreduce=lambda *of: None)
    transport.members, transport.rank, transport.size, transport.own_name = MEMBERS, 0, 3, ""
    transport.types = {array.dtype: None}
    bind_native_all_reduce(transport, array).start()
    (one,) = job.requests
    assert not needs(one, {4}) and needs(one, {4, 5})


def test_all_roots_of_a_process_have_one_lock(job):
    assert MpiJob(job.MPI).lock is job.lock
