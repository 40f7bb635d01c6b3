"""Delays: what their words mean, and how they are drawn."""

import pytest

from mpitrain.config.faults import Delay, delay_s, delays


@pytest.mark.parametrize(
    "text, said",
    [
        ("", []),
        ("3:40", [Delay(3, 0.04, 1.0)]),
        ("0:1.5,random:20:0.25", [Delay(0, 0.0015, 1.0), Delay(None, 0.02, 0.25)]),
    ],
)
def test_words_say_who_is_how_much_slower_and_how_often(text, said):
    assert delays(text) == said


def test_a_fixed_delay_is_per_rank_and_step_and_delays_add_up():
    late = delays("1:40,1:2,random:20:1")
    assert [delay_s(late, rank, 0, step) for step in (0, 1) for rank in (0, 1)] == pytest.approx(
        [0.02, 0.062] * 2
    )


def test_a_random_delay_has_its_frequency_and_is_reproducible():
    late = delays("random:1000:0.25,random:10:0.5")
    drawn = [delay_s(late, 0, 7, step, row) for step in range(500) for row in range(4)]
    assert drawn == [delay_s(late, 3, 7, step, row) for step in range(500) for row in range(4)]
    assert drawn != [delay_s(late, 0, 8, step, row) for step in range(500) for row in range(4)]
    often = {seconds: drawn.count(seconds) / len(drawn) for seconds in set(drawn)}
    wanted = {0: 0.375, 0.01: 0.375, 1.0: 0.125, 1.01: 0.125}  # each is drawn for itself
    assert set(often) == set(wanted) and all(abs(often[s] - wanted[s]) < 0.04 for s in wanted)
