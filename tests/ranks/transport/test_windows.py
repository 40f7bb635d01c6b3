"""Shared windows of groups that overlap: a rank knows windows that the others do not, and others may be slower."""

import itertools
import threading
import time

import numpy as np
import pytest

from mpitrain.collectives.group import Group, bind
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.transport.threads import run_ranks


def summed(transport, values):
    reduction = bind(transport, array := np.array(values, np.float32), algorithm="shared")
    reduction.run()
    return array.tolist()


@pytest.mark.parametrize("count", [5, 5000])
def test_groups_that_overlap_reduce_in_the_same_window(count):
    def work(transport):
        first = transport.split(0 if transport.rank in (0, 1) else None)
        second = transport.split(0 if transport.rank in (0, 2) else None)
        if first is not None:
            first.allocate(count, np.float32)
        if second is None:
            return None
        both = [bind(second, np.zeros(count, np.float32), algorithm="shared") for _ in range(2)]
        del both  # two windows are idle, which rank 0 has seen as its second and third one
        found = summed(second, [transport.rank + 1] * count)
        array = second.allocate(count, np.float32)
        array[:] = transport.rank + 1
        bind(second, array, algorithm="shared").run()
        return found, array.tolist()

    assert run_ranks(3, work) == [([4] * count,) * 2, None, ([4] * count,) * 2]


def delay_phases(reduction, delay):
    """Call `delay` before each phase of a reduction through shared memory."""

    class Late(list):
        def __iter__(self):
            delay()
            return super().__iter__()

    reduction._turns = ([*map(Late, phases)] for phases in reduction._turns)


def test_a_window_is_not_written_while_another_group_reads_it():
    written = threading.Event()

    def work(transport):
        part = transport.split(0 if transport.rank != 1 else None)
        reduction = bind(
            transport, array := np.full(5, 10.0**transport.rank, np.float32), algorithm="shared"
        )
        if transport.rank == 1:
            # The first phase writes, the second reads.
            number = itertools.count()
            delay_phases(reduction, lambda: next(number) and written.wait(10))
        reduction.run()
        if transport.rank != 1:
            del reduction
            assert summed(part, [7] * 5) == [14] * 5
            assert summed(part, [8] * 5) == [16] * 5
            written.set()
        return array.tolist()

    assert run_ranks(3, work) == [[111] * 5] * 3


@pytest.mark.product
@pytest.mark.parametrize("begun", [False, True], ids=["run", "started"])
@pytest.mark.parametrize("where", ["window", "plain"])
@pytest.mark.parametrize("half", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("count", [5, 5000])
def test_what_a_slow_rank_still_reads_is_not_written_over(count, half, where, begun):
    def work(transport):
        array = (
            transport.allocate(count, np.float32)
            if where == "window"
            else np.empty(count, np.float32)
        )
        reduction, found = getattr(Group(transport, "shared"), f"bind_{half}")(array), []
        if transport.rank == 1:
            delay_phases(reduction, lambda: time.sleep(0.02))
        for run in range(3):
            array[:] = 10.0**transport.rank * (run + 1)
            if begun:
                reduction.start()
                reduction.wait()
            else:
                reduction.run()
            found.append(array.copy())
            array[:] = np.nan
        return found

    for run, arrays in enumerate(zip(*run_ranks(3, work), strict=True), 1):
        for rank, (array, mine) in enumerate(zip(arrays, chunk_bounds(count, 3), strict=True)):
            if half == "reduce_scatter":
                assert (array[slice(*mine)] == 111 * run).all()
            else:
                assert all(
                    (array[slice(*chunk)] == 10.0**other * run).all()
                    for other, chunk in enumerate(chunk_bounds(count, 3))
                ), rank
