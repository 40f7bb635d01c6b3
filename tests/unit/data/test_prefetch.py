"""A prefetched source is the source: rows, errors and the order of reads."""

import threading

import numpy as np
import pytest

from mpitrain.data import Prefetched, open_source
from mpitrain.errors import DataError


class Recording:
    """A source that records its reads, and fails in one step."""

    form, shape, inputs, classes, held_out = "tokens", (2,), 9, 9, 10

    def __init__(self, fails=-1):
        self.reads, self.threads, self._fails = [], set(), fails

    def batch(self, seed, step, size, rows, before=None):
        self.reads.append(step)
        self.threads.add(threading.current_thread())
        if step == self._fails:
            raise DataError("A law is broken.", "Mend it.")
        return np.full((len(rows), 2), step), np.full((len(rows), 2), before or 0)

    def held_out_rows(self, rows):
        self.reads.append(tuple(rows))
        return np.array(rows), np.array(rows)


@pytest.fixture
def prefetched():
    made = []

    def make(source, ahead=2, steps=100):
        made.append(Prefetched(source, ahead, steps))
        return made[-1]

    yield make
    for source in made:
        source.close()


@pytest.mark.parametrize("ahead", (1, 3))
def test_rows_are_those_of_the_source_in_any_order_of_steps(prefetched, ahead):
    plain = open_source("pydocs", 16, "float32")
    source = prefetched(plain, ahead)
    for step in (5, 6, 7, 3, 4, 5, 5, 90, 91, 92):
        for rows in (range(2, 5), range(1), range(0)):
            for one, other in zip(
                source.batch(1, step, 8, rows), plain.batch(1, step, 8, rows), strict=True
            ):
                assert np.array_equal(one, other)


def test_it_reads_ahead_from_the_first_step_and_no_further_than_the_last(prefetched):
    inner = Recording()
    source = prefetched(inner, 3, 6)
    for step in range(2, 6):
        inputs, before = source.batch(0, step, 4, range(4), 4 * step)
        assert (inputs == step).all() and (before == 4 * step).all()
    source.close()
    assert inner.reads == [2, 3, 4, 5], "each step once"
    assert len(inner.threads) == 1 and threading.current_thread() not in inner.threads


def test_an_evaluation_between_steps_keeps_what_is_read_ahead(prefetched):
    inner = Recording()
    source = prefetched(inner)
    source.batch(0, 0, 4, range(4))
    for first in (0, 3, 6, 9):
        rows = list(range(first, min(first + 3, 10)))
        assert source.held_out_rows(rows)[0].tolist() == rows
    source.batch(0, 1, 4, range(4))
    source.close()
    steps = [read for read in inner.reads if isinstance(read, int)]
    assert steps in ([0, 1, 2], [0, 1, 2, 3]), "each step once; closing may cancel the last read"


def test_an_error_is_raised_by_the_step_that_needs_the_rows(prefetched):
    source = prefetched(Recording(fails=2), 2)
    for step in range(2):
        source.batch(0, step, 4, range(4))
    with pytest.raises(DataError) as raised:
        source.batch(0, 2, 4, range(4))
    assert raised.value.law == "A law is broken."


def test_closing_ends_the_thread_and_a_server_has_none():
    before = threading.active_count()
    source = Prefetched(Recording(), 2, 9)
    source.batch(0, 0, 4, range(0))
    assert threading.active_count() == before
    source.batch(0, 0, 4, range(4))
    assert threading.active_count() == before + 1
    source.close()
    assert threading.active_count() == before
