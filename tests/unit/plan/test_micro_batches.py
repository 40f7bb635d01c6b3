"""`mpitrain plan micro-batches`: what is predicted of a measurement, and what is refused. How it measures is in ranks/."""

from itertools import pairwise

import pytest

from mpitrain.config import parse, with_settings
from mpitrain.errors import ConfigError
from mpitrain.pipeline.schedule_files import write_plan
from mpitrain.pipeline.schedules import plan_of
from mpitrain.pipeline.simulate import Cost
from mpitrain.tools.plan.micro_batches import (
    MOST,
    advice,
    best,
    between,
    counts,
    explanation,
    neighbours,
    predict,
    sizes,
    table,
)
from mpitrain.tools.plan.stages import MessageTime, StageMeasurement


def configured(name="gpipe", *settings):
    return parse(with_settings({}, [f"pipeline.schedule={name}", *settings]))


def measured(rows, parts=4, fixed=2.0, each=1.0, way=(0.0, 0.0)):
    """What every chunk takes where forwards and halves take fixed + each x rows."""
    return StageMeasurement(
        rows, (Cost(*[fixed + each * rows] * 3, saved=10 * rows),) * parts, MessageTime(*way)
    )


@pytest.mark.parametrize(
    "name, stages, rows, found",
    [("1f1b", 3, 7, [3, 4, 5, 6, 7]), ("interleaved", 3, 11, [3, 6, 9]), ("v-half", 8, 8, [8])],
)
def test_counts_fit_the_schedule_and_the_rows(name, stages, rows, found):
    assert counts(configured(name), stages, rows) == found


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_of_many_counts_some_are_taken_from_the_fewest_to_the_most(name):
    found = counts(configured(name), 4, 5000)
    assert MOST / 2 < len(found) <= MOST and sorted(set(found)) == found
    assert (found[0], found[-1]) == (4, 5000)
    assert all(count % 4 == 0 for count in found) or name == "gpipe"
    assert all(after <= 1.35 * before or after - before <= 4 for before, after in pairwise(found))


def test_measured_micro_batches_are_the_ends_and_powers_of_two():
    assert sizes([3, 4, 7], 21) == [3, 4, 7] and sizes([8], 8) == [1]
    assert sizes([2, 5, 64], 64) == [1, 2, 4, 8, 16, 32]
    assert sizes([2, 4, 12], 72, 3) == [6, 12, 24, 36]


@pytest.mark.parametrize(
    "rows, halves, saved, way", [(2, 4, 20, 1), (3, 5, 30, 1.5), (8, 10, 80, 4), (1, 3, 10, 0.5)]
)
def test_between_measured_sizes_costs_lie_on_straight_lines(rows, halves, saved, way):
    costs, found = between([measured(r, way=(r / 2, r)) for r in (2, 4, 8)], rows)
    assert costs == [Cost(halves, halves, halves, saved=saved)] * 4
    assert found == (way, 2 * way, False)


def test_messages_between_two_sizes_are_eager_if_those_of_both_are():
    small, middle, large = (measured(rows, way=(1, 1, rows < 8)) for rows in (2, 4, 8))
    found = [between([small, middle, large], rows)[1].is_eager for rows in (3, 6)]
    assert found == [True, False]


def test_one_measured_size_serves_all():
    assert between([measured(2)], 2)[0] == list(measured(2).costs) == between([measured(2)], 5)[0]


def test_a_step_takes_what_the_published_bubble_says_and_its_end():
    """GPipe: (m + p - 1) times a micro-batch in a stage; 1F1B with the gradient sent early idles for 2 (p - 1) halves."""
    p, rows, sampled = 4, 24, [measured(rows) for rows in (1, 2, 4, 6)]
    for name, halves in (
        ("gpipe", lambda m: 3 * (m + p - 1)),
        ("1f1b", lambda m: 3 * m + 2 * (p - 1)),
    ):
        for found in predict(configured(name), p, rows, [4, 6, 24], sampled, 7.0):
            m = found.micro_batches
            assert found.step_s == pytest.approx(halves(m) * (2 + rows / m) + 7)
            assert found.rows == rows / m
            assert found.peak_bytes == 10 * rows / m * (m if name == "gpipe" else 4)


def test_a_message_is_paid_for_where_it_was_measured():
    """GPipe: 2 c (p - 1) beside compute; of the receiver's own time with every micro-batch and direction."""
    beside, own = (
        predict(configured(), 2, 8, [4], [measured(2, 2, way=way)], 0.0)[0].step_s
        for way in ((1, 0), (0, 1))
    )
    alone = predict(configured(), 2, 8, [4], [measured(2, 2)], 0.0)[0].step_s
    assert beside == alone + 2 and own > beside


@pytest.mark.slow
def test_the_best_count_is_that_of_the_root_where_messages_take_no_time():
    """m* = sqrt(b (p-1) t / a): here sqrt(3 x 3 x 192 / 6) = 16.97 for gpipe."""
    config, sampled = configured(), [measured(rows) for rows in (1, 48)]
    found = predict(config, 4, 192, counts(config, 4, 192), sampled, 0.0)
    assert abs(best(found).micro_batches - 17) <= 1
    assert [each.micro_batches for each in neighbours(found)][1] == best(found).micro_batches
    root = "sqrt(1 x 3 x 5.76e+05 / 6e+03) = 17.0 micro-batches"
    assert root in explanation(config, 4, 192, sampled)[1]
    lines = table(found)
    assert len(lines) == 13 and max(map(len, lines)) <= 80
    assert sum("<- best" in line for line in lines) == 1
    numbers = [int(line.split()[0]) for line in lines[1:]]
    assert numbers == sorted(numbers)


def test_counts_from_noisy_measurements_are_marked_and_not_best():
    """Of 1, 2, 4 and 8 rows the second was measured while other work ran: 8 rows take 8, 4, 2 or 1 micro-batches of that size."""
    sampled = [
        measured(rows)._replace(spread=spread)
        for rows, spread in ((1, 1.9), (2, 2.1), (4, 1.0), (8, 1.0))
    ]
    found = predict(configured(), 1, 8, [1, 2, 3, 4, 5, 8], sampled, 0.0)
    assert [each.is_spoilt for each in found] == [False, False, True, True, True, False]
    marked = [each._replace(step_s=0.1) if each.is_spoilt else each for each in found]
    assert best(marked).micro_batches == 1 and advice(marked)[-1] == "Set batch.micro_batches to 1."
    assert advice(marked)[0].startswith("~ 3 of 6 counts: measured while other work ran")
    lines = {int(line.split()[0]): line for line in table(marked)[1:]}
    assert [count for count, line in lines.items() if "~" in line] == [3, 4, 5] and lines[
        1
    ].endswith("<- best")
    none = [each._replace(is_spoilt=True) for each in found]
    assert advice(none)[-1].startswith("No count can be named") and not any(
        "best" in line for line in table(none)
    )
    assert "is not known" in explanation(configured(), 2, 8, [sampled[1], sampled[2]])[0]


def test_of_counts_as_fast_as_each_other_the_fewest_are_best():
    free = [measured(rows, 1, fixed=0.0) for rows in (1, 8)]
    assert best(predict(configured(), 1, 8, [1, 2, 4, 8], free, 0.0)).micro_batches == 1
    free = [measured(rows, 2, fixed=0.0) for rows in (1, 4)]
    assert "nothing besides its rows" in explanation(configured(), 2, 8, free)[0]


def test_what_leaves_no_choice_is_refused(tmp_path):
    write_plan(tmp_path / "own.json", plan_of("1f1b", 2, 4))
    for config, stages, rows, law, way_out in (
        (configured(), 1, 8, "A model on one stage has no bubble", "--pp 2"),
        (
            configured("1f1b"),
            4,
            3,
            "A pipeline of 4 stages needs as many micro-batches, but a replica has 3 row(s).",
            "size",
        ),
        (
            configured(str(tmp_path / "own.json")),
            2,
            8,
            "A schedule in a file has its number of micro-batches",
            "gpipe, 1f1b",
        ),
        (configured("2f2b"), 2, 8, "'2f2b' is neither", ""),
    ):
        with pytest.raises(ConfigError) as caught:
            counts(config, stages, rows)
        assert law in caught.value.law and way_out in caught.value.way_out
