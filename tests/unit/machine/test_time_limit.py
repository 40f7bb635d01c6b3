"""When a run stops for the time limit of its job, on a clock that the test moves."""

import time

import pytest

from mpitrain.machine.time_limit import LEAVING, UNMEASURED, TimeLimit


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def limit(ends, checkpoint_s=0.0, steps=1):
    return TimeLimit(lambda: ends, checkpoint_s, steps)


def test_it_stops_three_checkpoints_and_two_steps_before_the_end(clock):
    near = limit(ends=2000.0)
    for seconds in (90.0, 2.0, 5.0, 4.0):  # the first step compiles
        near.stepped(seconds)
    for seconds in (3.0, 7.0, 4.0):
        near.saved(seconds)
    assert near.margin == 3 * 7 + 2 * 5 + LEAVING == 36
    for clock[0], wanted in ((1000.0, False), (1963.9, False), (1964.0, True), (3000.0, True)):
        assert near.is_near() == wanted
    clock[0] = 1970.0
    assert near.reason() == {"before_limit_s": 36.0}, "as of the first request"


def test_a_period_of_local_steps_counts_as_one_step(clock):
    near = limit(2000.0, checkpoint_s=1.0, steps=10)
    near.stepped(2.0)
    assert near.margin == 3 + 2 * 10 * 2 + LEAVING


def test_before_the_first_checkpoint_its_time_is_assumed(clock):
    assert limit(2000.0).margin == 3 * UNMEASURED + LEAVING
    assert limit(2000.0, checkpoint_s=5.0).margin == 15 + LEAVING


def test_a_job_that_is_too_short_trains_for_half_of_it(clock):
    near = limit(ends=1060.0, checkpoint_s=50.0)
    assert not near.is_near()
    clock[0] = 1029.9
    assert not near.is_near() and near.margin == 30
    clock[0] = 1030.0
    assert near.is_near()


@pytest.mark.parametrize("job_ends, wanted", [(None, 4600), (4000.0, 4000), (9000.0, 4600)])
def test_the_sooner_of_job_and_hours_ends_the_run(job_ends, wanted, clock):
    near = TimeLimit(lambda: job_ends, 10.0, 1, 3600.0)
    assert not near.is_near() and near.left() == wanted - 1000
    for clock[0], is_near in ((wanted - 36, False), (wanted - 35, True)):
        assert near.is_near() == is_near


def test_without_a_known_end_it_never_stops(clock):
    near = limit(ends=None, checkpoint_s=50.0)
    clock[0] = 1e12
    assert not near.is_near() and near.left() is None and near.reason() == {}
