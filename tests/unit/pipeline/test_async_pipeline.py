"""Streams as data: what a stage does in one step after another is 1F1B over all of them, and holds what is published."""

from collections import Counter
from itertools import product

import pytest

from mpitrain.config import with_settings
from mpitrain.errors import ConfigError
from mpitrain.parallel.modes import STREAMS as MODES
from mpitrain.pipeline.async_pipeline import moved, pieces
from mpitrain.pipeline.schedules import (
    STREAMS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    fused_at_the_input,
    plan_of,
    with_messages,
)
from mpitrain.pipeline.simulate import Cost, simulate, versions
from mpitrain.run.choices import parse

POINTS = [(p, m) for p in (1, 2, 3, 5) for m in (p, p + 1, 2 * p + 1)]


def stream(p, m, steps):
    """What every stage does in so many steps, piece by piece."""
    program = []
    for stage in range(p):
        first, following, last = pieces(stage, p, m)
        between = [i for step in range(1, steps) for i in moved(following, step * m)]
        program.append((*first, *between, *moved(last, (steps - 1) * m)))
    return tuple(program)


def typed(instructions):
    """Instructions of two kinds are equal as tuples."""
    return [(type(i).__name__, *i) for i in instructions]


def test_an_async_pipeline_has_one_name_in_every_table():
    assert set(STREAMS) == set(MODES)


@pytest.mark.parametrize("steps", (1, 2, 4))
def test_async_steps_join_to_one_1f1b_without_deadlock(steps):
    for p, m in POINTS:
        plan = fused_at_the_input(plan_of("1f1b", p, steps * m))
        whole, cut = with_messages(plan), stream(p, m, steps)
        for mine, wanted, computed in zip(cut, whole, plan.by_stage, strict=True):
            assert Counter(typed(mine)) == Counter(typed(wanted)), (p, m)
            assert typed(
                i
                for i in mine
                if isinstance(i, Forward | Backward | BackwardInput | BackwardWeight)
            ) == typed(computed)
        one, other = (simulate(program, [Cost()] * p) for program in (cut, whole))
        assert not one.waits and one.makespan == other.makespan, (p, m)


def test_no_stage_idles_between_first_backward_and_last_forward():
    for p, m in POINTS:
        for mine in simulate(stream(p, m, 4), [Cost()] * p).timeline:
            kinds = [type(event.instruction) for event in mine]
            steady = mine[
                next(i for i, kind in enumerate(kinds) if kind is not Forward) : len(kinds)
                - kinds[::-1].index(Forward)
            ]
            assert sum(e.end - e.start for e in steady) == (
                steady[-1].end - steady[0].start if steady else 0
            ), (p, m)


def test_a_stage_holds_as_many_versions_as_published():
    for p, m in product(range(1, 9), range(1, 17)):
        lists = plan_of("async", p, m).by_stage
        assert [versions(mine) for mine in lists] == [
            min(p - s, m, max(m - (p - s), 0) + 2) for s in range(p)
        ], (p, m)
        for every in (every for every in range(max(1, p - 1), m + 1) if m % every == 0):
            assert {versions(mine, every) for mine in lists} == {min(2, m // every)}, (p, m, every)


@pytest.mark.parametrize(
    "settings, law, way_out",
    [
        (
            ["model.tied=true"],
            "With schedule async each stage updates by itself, but model.tied has two share a tensor.",
            "Set m",
        ),
        (
            ["precision.compute=float16"],
            "no stage waits until all know of an overflow, but the loss scale of float16",
            "bfloat16",
        ),
        (
            ["replication.zero=1"],
            "Schedule async needs replication.zero 0, but it is 1.",
            "Set replication.zero to 0, or pipeline",
        ),
        (
            ["replication.wire=bf16"],
            "Schedule async needs replication.wire none, but it is bf16.",
            "Set replication.wire to none",
        ),
        (
            ["replication.mode=local", "layout.pp=1"],
            "Schedule async needs replication.mode all-reduce, but it is local.",
            "1f1b",
        ),
    ],
)
def test_settings_unfit_for_async_stages_are_refused_early(settings, law, way_out):
    with pytest.raises(ConfigError) as caught:
        parse(with_settings({}, ["pipeline.schedule=async", "layout.pp=2", *settings]))
    assert law in caught.value.law and way_out in caught.value.way_out


def test_a_head_of_classes_has_no_tie_that_async_stages_would_refuse():
    own = ["pipeline.schedule=async", "layout.pp=2", "model.tied=true", "model.kind=bert"]
    parse(with_settings({}, [*own, "data.source=jsonl:texts.jsonl"]))
    with pytest.raises(ConfigError, match="tied"):
        parse(with_settings({}, own))
