"""The key run.inject: which texts name a failure, and which failures a job refuses."""

import pytest

from mpitrain.config import parse, with_settings
from mpitrain.config.faults import KINDS, POINTS, Injection, check_injection, injection
from mpitrain.errors import ConfigError
from mpitrain.run.injection import ELEMENT_FAILURES, FAILURES


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
        check_injection(text, ranks, 6)
    assert law in raised.value.law


def test_every_kind_has_a_function_and_known_points():
    assert {*FAILURES, *ELEMENT_FAILURES, "lose"} == {*KINDS}
    assert all(point in POINTS for kind in KINDS.values() for point in kind.points)
