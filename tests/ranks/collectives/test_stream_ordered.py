"""Collectives over the GPU memory of all ranks, in every order of hosts and devices: tests.fakes.cupy finds each race.

One thread plays all ranks: a generator with a seed chooses the rank that goes on, and when a device passes an event.
"""

import gc
import sys
import time

import numpy as np
import pytest

from mpitrain.collectives.cuda_ipc import StreamOrdered
from mpitrain.collectives.group import bind
from mpitrain.errors import CommError, PeerLost
from mpitrain.machine import cuda
from mpitrain.machine.cuda import CudaBackend
from mpitrain.transport.device import Staged
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy

pytestmark = pytest.mark.slow

COUNTS = (37, 0, 3)  # elements of the buckets: ragged, empty, and fewer than some ranks
RUNS = 2


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    """A machine with CuPy and a GPU that all ranks share."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda, "_allocation_start", cupy.allocation_start)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    cupy.faults.clear()
    yield
    cupy.devices.broken = False
    cupy.faults.clear()
    gc.collect()  # a run that has not ended refers to itself
    assert cupy.ipc.opened == [] and cupy.ipc.events == {}


class Rank:
    """One rank: its stream of computation, its arrays, and a reduction of each."""

    def __init__(self, threads):
        self.memory = CudaBackend()
        self.transport = transport = Staged(threads, self.memory)
        self.rank, self.size, self.stream = threads.rank, threads.size, cupy.get_current_stream()
        self.arrays = [self.memory.zeros(count, "float64") for count in COUNTS]
        self.other = self.memory.zeros(4, "float64")
        self.reductions = [bind(transport, array, algorithm="shared") for array in self.arrays]

    def brought(self, rank, count, run):
        """Different on every rank, place and run; whole numbers, so that sums are exact."""
        return (np.arange(count) * 7 + 31 * rank + 101 * run) % 97 - 40.0

    def program(self, rng, ends):
        """Steps: gradients on the stream, their reductions, other computation meanwhile, results, again.

        ends  "poll" or "order", by which the runs end
        """
        for run in range(RUNS):
            for array, reduction in zip(self.arrays, self.reductions, strict=True):
                array[...] = self.memory.from_host(self.brought(self.rank, array.size, run))
                reduction.start()
                yield
                self.other += self.other
                if rng.random() < 0.5:
                    getattr(self.reductions[rng.integers(len(COUNTS))], ends)()
                yield
            left = list(self.reductions)
            while left:
                at = rng.integers(len(left))
                if getattr(left[at], ends)():
                    left.pop(at)
                yield
            for array in self.arrays:
                everyone = [self.brought(rank, array.size, run) for rank in range(self.size)]
                if not np.array_equal(self.memory.to_host(array), sum(everyone)):
                    raise Wrong
            yield


class Wrong(Exception):
    """A sum that is not the sum."""


def played(ranks, seed, monkeypatch, ends):
    """Run all programs in an order of this seed; return whether a race or a wrong sum was found."""
    rng = np.random.default_rng(seed)
    slow = 0.02 + rng.random(3) ** 3  # of the device, and of two kinds of ranks

    def passed(event):
        if event._has_ended() or rng.random() < slow[0]:
            event.synchronize()
            return True
        return False

    monkeypatch.setattr(cupy.Event, "passed", passed)
    programs = {rank: rank.program(rng, ends) for rank in ranks}
    try:
        while programs:
            each = [slow[1 + rank.rank % 2] for rank in programs]
            rank = list(programs)[rng.choice(len(each), p=np.divide(each, sum(each)))]
            cupy._local.stream = rank.stream
            if next(programs[rank], "ended") == "ended":
                del programs[rank]
    except (Wrong, CommError):
        return True
    return bool(cupy.faults)


@pytest.mark.parametrize("ends", ["poll", "order"])
@pytest.mark.parametrize("n, seeds", [(1, 2), (2, 10), (3, 5), (4, 3)])
def test_no_order_of_hosts_and_devices_lets_ranks_race(n, seeds, ends, monkeypatch):
    ranks = run_ranks(n, Rank)
    assert all(isinstance(one, StreamOrdered) for rank in ranks for one in rank.reductions)
    for seed in range(seeds):
        assert not played(ranks, seed, monkeypatch, ends), (seed, cupy.faults)


def no_waits(rank, one):
    rank.memory.follow = lambda place: None


def no_barrier(rank, one):
    one._recorded = Stub()


def no_announcements(rank, one):
    one._peers = []


def announced_early(rank, one):
    one._aside.has_passed = lambda event: True


def no_second_barrier(rank, one):
    one._launched = Stub()


def no_waits_for_the_work_of_others(rank, one):
    one._events = one._events[0], []


class Stub:
    """A step that has always ended."""

    def start(self):
        pass

    def test(self):
        return True


@pytest.mark.parametrize(
    "ends, broken",
    [
        *(("poll", each) for each in (no_waits, no_barrier, no_announcements, announced_early)),
        *(("order", each) for each in (no_second_barrier, no_waits_for_the_work_of_others)),
    ],
)
def test_each_step_of_the_protocol_is_needed(ends, broken, monkeypatch):
    found = []
    for seed in range(4):
        ranks = run_ranks(2, Rank)
        cupy.faults.clear()
        for rank in ranks:
            for one in rank.reductions:
                broken(rank, one)
        found.append(played(ranks, seed, monkeypatch, ends))
    assert any(found)


def ordered(reduction):
    reduction.start()
    while not reduction.order():
        time.sleep(0)


def test_a_rank_may_drop_a_reduction_while_others_end_its_run():
    def run(threads):
        rank = Rank(threads)
        for count in range(1, 9):
            array = rank.memory.zeros(count, "float64")
            ordered(bind(rank.transport, array, algorithm="shared"))

    run_ranks(3, run)
    assert cupy.faults == []


def test_the_host_waits_for_no_device(monkeypatch):
    def run(threads):
        rank = Rank(threads)
        threads.barrier()
        monkeypatch.setattr(cupy.Event, "passed", lambda event: False)
        cupy.log().clear()
        rank.arrays[0] += 1
        ordered(rank.reductions[0])
        assert cupy.get_current_stream().ordered() and ("synchronize",) not in cupy.log()
        threads.barrier()
        assert np.array_equal(rank.memory.to_host(rank.arrays[0]), [3.0] * COUNTS[0])
        threads.barrier()

    run_ranks(3, run)


def test_a_lost_rank_ends_a_run_that_its_device_would_never_end(monkeypatch):
    """The devices of the survivors wait forever for the work of the lost one."""

    def run(threads):
        rank = Rank(threads)
        threads.barrier()
        monkeypatch.setattr(cupy.Event, "passed", lambda event: False)
        reduction = rank.reductions[0]
        reduction.start()
        while reduction._done is None:
            reduction.poll()
        threads.barrier()
        if threads.rank == 1:
            raise KeyError("died")
        with pytest.raises(PeerLost) as lost:
            reduction.wait()
        losses.append(lost.value.ranks)

    losses = []
    with pytest.raises(KeyError):
        run_ranks(3, run)
    assert losses == [(1,)] * 2


def test_a_wait_for_a_rank_that_does_not_start_names_it():
    def run(threads):
        rank = Rank(threads)
        if threads.rank == 0:
            rank.reductions[0].run()

    with pytest.raises(PeerLost, match="recv from rank 1"):
        run_ranks(2, run)


def test_a_failed_device_ends_a_run(monkeypatch):
    def run(threads):
        reduction = Rank(threads).reductions[0]
        reduction.start()
        while reduction._done is None:
            reduction.poll()
        threads.barrier()
        cupy.devices.broken = True
        reduction.wait()

    with pytest.raises(cupy.CUDARuntimeError, match="700"):
        run_ranks(2, run)
