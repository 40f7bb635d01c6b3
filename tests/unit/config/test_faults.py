"""Artificial stragglers and failures: what run.delay and run.inject say, and which failures a job refuses."""

import pytest

from mpitrain.config import parse, with_settings
from mpitrain.config.faults import KINDS, POINTS, Delay, Injection, delay_s, delays, injection
from mpitrain.errors import ConfigError
from mpitrain.run.injection import ELEMENT_FAILURES, FAILURES
from mpitrain.run.rules import check_each, of_injection


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


@pytest.mark.parametrize(
    "text, found",
    [
        ("", None),
        ("kill:1@3", Injection("kill", 1, 3, "step")),
        ("_exit:12@0", Injection("_exit", 12, 0, "start")),
        ("raise:0@100:save", Injection("raise", 0, 100, "save")),
        ("nan:2@1", Injection("nan", 2, 1, "backward")),
    ],
)
def test_a_text_names_kind_rank_step_and_point(text, found):
    assert injection(text) == found
    assert parse(with_settings({}, [f"run.inject={text}"])).run.inject == text


@pytest.mark.parametrize(
    "text", ["kill", "kill:1", "kill:@3", "kill:-1@3", "die:1@3", "kill:1@3:", "kill:1@3:later"]
)
def test_another_text_is_refused(text):
    with pytest.raises(ConfigError, match=r"run\.inject must be"):
        parse(with_settings({}, [f"run.inject={text}"]))


@pytest.mark.parametrize(
    "text, ranks, law",
    [
        ("kill:2@1", 2, "ranks are 0 to 1"),
        ("deadlock:0@1", 1, "at least 2 ranks"),
        ("lose:0@1:forward", 2, "the point is forward"),
        ("nan:0@1:save", 1, "the point is save"),
        ("kill:0@1:start", 1, "step 1"),
        ("kill:0@0:save", 1, "step 0"),
        ("kill:0@7", 1, "run.steps 6"),
    ],
)
def test_a_failure_that_cannot_happen_is_refused(text, ranks, law):
    with pytest.raises(ConfigError) as raised:
        check_each(of_injection(text, ranks, 6))
    assert law in raised.value.law


def test_every_kind_has_a_function_and_known_points():
    assert {*FAILURES, *ELEMENT_FAILURES, "lose"} == {*KINDS}
    assert all(point in POINTS for kind in KINDS.values() for point in kind.points)
