"""What whoever moves started reductions must do, over any transport whose ranks are on hosts of their own."""

import threading
import time

import numpy as np

from mpitrain.collectives.compression import bind_lossy
from mpitrain.collectives.engine.arithmetic import parse_wire
from mpitrain.collectives.engine.executor import ProgressEngine, ProgressThread
from mpitrain.collectives.group import bind
from tests.laws.transport import coded
from tests.processes import SECONDS

ALGORITHMS = ("ring", "halving-doubling", "recursive-doubling", "tree", "star", "hierarchical")
WAYS = (*ALGORITHMS, "fp16", "int8", "topk:0.1", "powersgd:2")
COUNT = 70_001


def apart(transport):
    """The same ranks, each on a host of its own; every second one for hierarchical to have two levels."""
    part = transport.split(0)
    part.hosts = tuple(f"host{rank // 2}" for rank in range(part.size))
    return part


def bound(transport, way, array):
    """An all-reduce by an algorithm or a wire format."""
    if way in ALGORITHMS:
        return bind(transport, array, algorithm=way)
    return bind_lossy(transport, array, parse_wire(way))


def brought(rank, way):
    """Data whose sum depends on the order of summation."""
    return np.random.default_rng((rank, WAYS.index(way))).standard_normal(COUNT).astype(np.float32)


class MovingLaws:
    """A law is a function of one rank's transport; all ranks run it together."""

    def law_a_progress_thread_gives_the_same_bits_without_polls(self, transport):
        transport = apart(transport)
        wanted = {way: brought(transport.rank, way) for way in WAYS}
        by_caller = ProgressEngine(transport)
        for way, array in wanted.items():
            by_caller.start(bound(transport, way, array))
        by_caller.wait()
        arrays = {way: brought(transport.rank, way) for way in WAYS}
        reductions = [bound(transport, way, array) for way, array in arrays.items()]
        by_thread = ProgressThread(transport)
        for reduction in reductions:
            by_thread.start(reduction)
        late = time.monotonic() + SECONDS / 2  # before the test's own time ends
        while not all(np.array_equal(arrays[way], wanted[way]) for way in WAYS):
            assert time.monotonic() < late, [
                way for way in WAYS if not np.array_equal(arrays[way], wanted[way])
            ]
            time.sleep(0.005)
        by_thread.wait()
        assert all(np.array_equal(arrays[way], wanted[way]) for way in WAYS)
        transport.close()

    def law_the_main_thread_may_send_and_meet_while_a_thread_moves(self, transport):
        transport = apart(transport)
        before, after = (transport.rank - 1) % transport.size, (transport.rank + 1) % transport.size
        array = coded(transport.rank, COUNT)
        reduction, by_thread = bind(transport, array), ProgressThread(transport)
        for _ in range(3):
            array[:] = coded(transport.rank, COUNT)
            by_thread.start(reduction)
            transport.barrier()
            incoming = np.empty(COUNT)
            transport.exchange(coded(transport.rank, COUNT), after, incoming, before)
            assert np.array_equal(incoming, coded(before, COUNT))
            assert transport.gather_text(transport.rank) == list(range(transport.size))
            by_thread.wait()
            assert np.array_equal(array, sum(coded(rank, COUNT) for rank in range(transport.size)))
        transport.close()

    def law_the_thread_lives_from_the_first_start_to_the_wait(self, transport):
        transport = apart(transport)
        array = np.ones(3)
        reduction, by_thread = bind(transport, array), ProgressThread(transport)
        for _ in range(2):
            by_thread.start(reduction)
            mine = by_thread._thread
            assert mine in threading.enumerate()
            by_thread.wait()
            assert mine not in threading.enumerate()
        transport.close()
