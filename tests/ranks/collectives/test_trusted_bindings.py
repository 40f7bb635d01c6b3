"""Ranks that compare no bindings choose alike, though only some have the array in a window."""

import numpy as np
import pytest

from mpitrain.collectives.group import Group
from mpitrain.transport.threads import run_ranks

SIZES = 1000, 100_000, 500_000
"""Between hosts, "auto" of "aaab" and "aaaab" chooses by the memory of all ranks at some of these."""


def algorithms(transport, without):
    group, found = Group(transport, compares=False), []
    for size in SIZES:
        array = transport.allocate(size, np.float32)
        if transport.rank in without:  # as on a host without room for a window
            array = np.zeros(size, np.float32)
        for bind in (group.bind, group.bind_reduce_scatter, group.bind_all_gather):
            array[:] = transport.rank + 1
            reduction = bind(array)
            reduction.run()
            found.append(reduction.algorithm)
            if bind == group.bind:
                assert (array == sum(range(transport.size + 1))).all()
    return found


@pytest.mark.parametrize(
    "hosts, without",
    [
        ("aaab", ()),
        ("aaaab", ()),
        ("aabbc", ()),
        ("aaaabb", (4, 5)),
        ("aaa", (0, 1, 2)),
        ("aaa", ()),
    ],
)
def test_ranks_that_compare_nothing_choose_alike(hosts, without):
    first, *others = run_ranks(len(hosts), algorithms, without, hosts=hosts)
    assert all(other == first for other in others)


def offsets(transport):
    """Two stages have a tied tensor at different offsets of their windows."""
    buffer = transport.allocate(40_000, np.float32)
    array = buffer[10_000 * transport.rank :][:20_000]
    array[:] = transport.rank + 1
    group = Group(transport, compares=False)
    group.bind(array, is_alike=False).run()
    return set(array.tolist())


def test_an_array_may_have_another_offset_on_each_rank():
    assert run_ranks(2, offsets, hosts="aa") == [{3.0}] * 2


def gathers(transport):
    """Return how often the bindings of large and small arrays gather."""
    group, gather, calls = Group(transport, compares=False), transport.gather_text, []
    transport.gather_text = lambda value: calls.append(value) or gather(value)
    kept, counts = [], []
    for size in (100_000, 5, 5):
        array = transport.allocate(size, np.float32) if size > 5 else np.zeros(size, np.float32)
        array[:] = transport.rank + 1
        kept.append(group.bind(array))
        kept[-1].run()
        assert (array == sum(range(transport.size + 1))).all()
        counts.append(len(calls))
        calls.clear()
    return counts


def test_ranks_of_one_host_gather_only_which_windows_are_idle():
    """Copies of small arrays are in windows: the second one may borrow that of the first."""
    assert run_ranks(3, gathers, hosts="aaa") == [[0, 0, 1]] * 3
