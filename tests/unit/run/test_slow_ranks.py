"""Slow ranks on invented times: named after some readings, cleared after some, never when healthy."""

import numpy as np

from mpitrain.parallel.grid import Axes
from mpitrain.run.slow_ranks import TIMES, Readings, SlowRanks, alike
from mpitrain.trace.recorder import Pace, Recorder
from mpitrain.trace.timeline import trace_file

RANKS = 4


def after(readings, *own, steps=10, seconds=2.0, interval=None):
    """The slow rank after each reading; `own` has the seconds of a step of each rank."""
    found = []
    totals = getattr(readings, "totals", {rank: Pace(0, 0.0, 0.0) for rank in range(RANKS)})
    for times in own:
        totals = {
            rank: Pace(
                totals[rank].steps + steps,
                totals[rank].seconds + seconds,
                totals[rank].own + steps * mine,
            )
            for rank, mine in enumerate(times)
        }
        readings.step = getattr(readings, "step", 0) + steps
        readings.add(readings.step, totals)
        found.append(readings.slow)
    readings.totals = totals
    return found


EVEN, SLOW = (0.1, 0.1, 0.1, 0.1), (0.1, 0.1, 0.14, 0.1)


def test_a_slow_rank_is_named_after_some_readings_with_its_begin():
    readings = Readings([range(RANKS)])
    found = after(readings, EVEN, EVEN, *[SLOW] * TIMES)
    assert found[:-1] == [None] * (1 + TIMES)
    assert (found[-1].rank, found[-1].since) == (2, 20)
    assert abs(found[-1].times - 1.4) < 1e-9


def test_a_named_rank_stays_named_between_both_bounds_and_is_cleared_below():
    readings = Readings([range(RANKS)])
    after(readings, EVEN, *[SLOW] * TIMES)
    between = after(readings, *[(0.1, 0.1, 0.12, 0.1)] * 9)
    assert {slow.rank for slow in between} == {2} and between[-1].since == 10
    cleared = after(readings, *[EVEN] * TIMES)
    assert [slow is None for slow in cleared] == [False] * (TIMES - 1) + [True]


def test_ranks_that_are_slow_in_turns_are_not_named():
    readings = Readings([range(RANKS)])
    turns = [tuple(np.roll((0.2, 0.1, 0.1, 0.1), turn)) for turn in range(40)]
    assert set(after(readings, *turns)) == {None}


def test_noise_of_a_fifth_names_no_rank():
    random, readings = np.random.default_rng(0), Readings([range(RANKS)])
    noisy = [tuple(random.uniform(0.1, 0.12, RANKS)) for _ in range(2000)]
    assert set(after(readings, *noisy)) == {None}


def test_a_small_excess_of_a_fast_step_is_not_named():
    readings = Readings([range(RANKS)])
    assert set(after(readings, *[(0.003, 0.002, 0.002, 0.002)] * 9)) == {None}


def test_readings_within_a_second_or_a_few_steps_count_together():
    readings = Readings([range(RANKS)])
    assert set(after(readings, EVEN, *[SLOW] * 4, steps=4)) == {None}
    readings = Readings([range(RANKS)])
    assert set(after(readings, EVEN, *[SLOW] * 4, seconds=0.6)) == {None}


def test_only_ranks_with_equal_work_are_compared():
    assert alike(Axes(tp=2, dp=2, pp=2), 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [len(group) for group in alike(Axes(dp=4), 6)] == [2, 2]
    assert alike(Axes(dp=3, servers=1), 6) == [[0, 1, 2]]
    assert alike(Axes(dp=3), 6, [0]) == [[1, 2]]
    assert alike(Axes(), 6) == [] and alike(Axes(pp=4), 6) == []


def test_totals_are_those_of_finished_steps_without_waits(tmp_path):
    (tmp_path / "trace").mkdir()
    now = 0.0
    recorder = Recorder(clock=lambda: now)
    recorder.keep(trace_file(tmp_path, 0))
    for step in range(3):
        with recorder.stepping(step):
            now += 2.0
            wait = recorder.wait(recorder.name("sums"))
            now += 5.0
            recorder.go_on(wait)
            now += 1.0
        now += 100.0
    ranks = SlowRanks(tmp_path, "ab", [])
    assert ranks.paces() == {0: Pace(3, 24.0, 9.0)}
    ranks.close()
