"""Learning-rate schedules: their shape against the formulas, and keys that do not fit."""

import math

import pytest

from mpitrain.config import Optimizer, parse, with_settings
from mpitrain.errors import ConfigError
from mpitrain.optim import learning_rate
from mpitrain.optim.optimizer import DECAYS
from mpitrain.run.rules import check_each, of_optimizer

STEPS = 100


def rates(**keys):
    settings = Optimizer(lr=2.0, warmup=10, **keys)
    return [learning_rate(settings, step, STEPS) for step in range(STEPS + 5)]


def test_the_configuration_names_all_schedules():
    assert {*Optimizer.model_fields["schedule"].annotation.__args__} == {*DECAYS}


@pytest.mark.parametrize("schedule", ("linear", "cosine"))
def test_defaults_have_the_bits_of_a_decay_to_a_tenth(schedule):
    for step, rate in enumerate(rates(schedule=schedule)):
        progress = min(1.0, (step - 10) / 90)
        decay = {
            "linear": 1.0 - 0.9 * progress,
            "cosine": 0.1 + 0.45 * (1 + math.cos(math.pi * progress)),
        }[schedule]
        assert rate == 2.0 * ((step + 1) / 10 if step < 10 else decay)


@pytest.mark.parametrize("schedule, length", [("wsd", 20), ("wsd", 30), ("linear", 30)])
def test_a_decay_of_some_steps_is_the_end_of_the_run(schedule, length):
    found = rates(schedule=schedule, final=0.25, decay_steps=0 if length == 20 else length)
    first = STEPS - length
    assert {*found[9 : first + 1]} == {2.0} and {*found[STEPS:]} == {0.5}
    for step in range(first, STEPS):
        assert abs(found[step] - 2.0 * (1 - 0.75 * (step - first) / length)) < 1e-12


def test_a_cosine_of_some_steps_ends_at_its_final_rate():
    found = rates(schedule="cosine", final=0.0, decay_steps=40)
    assert found[60] == 2.0 and found[STEPS] == 0.0
    assert abs(found[80] - 1.0) < 1e-12


@pytest.mark.parametrize(
    "settings",
    [
        ("schedule=constant", "final=0.2"),
        ("schedule=constant", "decay_steps=10"),
        ("schedule=wsd", "warmup=50", "decay_steps=51"),
    ],
)
def test_a_decay_that_fits_no_schedule_or_run_is_refused(settings):
    whole = parse(
        with_settings({}, ["run.steps=100", *(f"optimizer.{setting}" for setting in settings)])
    )
    with pytest.raises(ConfigError) as raised:
        check_each(of_optimizer(whole))
    assert settings[-1].partition("=")[2] in raised.value.law
