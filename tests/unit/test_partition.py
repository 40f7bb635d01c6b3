"""Cuts of a model: as even as every other cut, and refused where there is none."""

from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.pipeline.partition import balanced, by_hand


def times(counts, costs, speeds):
    """What each part takes."""
    bounds = pairwise([0, *accumulate(counts)])
    return [sum(costs[start:stop]) / speed for (start, stop), speed in zip(bounds, speeds, strict=True)]


def all_cuts(units, parts):
    """Every way to give each of the parts some units, in order."""
    return [[stop - start for start, stop in pairwise((0, *cut, units))] for cut in combinations(range(1, units), parts - 1)]


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_has_a_faster_slowest_part_and_none_as_fast_is_more_even(seed):
    draw = np.random.default_rng(seed)
    units = int(draw.integers(1, 10))
    parts = int(draw.integers(1, min(units, 5) + 1))
    costs, speeds = draw.integers(0, 9, units).tolist(), draw.choice([1.0, 2.0, 4.0], parts).tolist()

    def badness(counts):
        found = times(counts, costs, speeds)
        return max(found), sum(time ** 2 for time in found)

    counts = balanced(costs, parts, speeds)
    assert sum(counts) == units and len(counts) == parts and min(counts) >= 1
    assert badness(counts) == min(map(badness, all_cuts(units, parts)))


@pytest.mark.parametrize("costs, parts, counts", [
    ([1] * 10, 4, [2, 2, 3, 3]),
    ([5, 1, 1, 1, 1, 1, 5], 3, [1, 5, 1]),
    ([0.0] * 3, 3, [1, 1, 1]),
    ([7.5], 1, [1]),
])
def test_parts_are_even(costs, parts, counts):
    assert balanced(costs, parts) == counts


def test_a_stage_of_twice_the_speed_gets_twice_the_units():
    assert balanced([1] * 9, 2, [2, 1]) == [6, 3] and balanced([1] * 12, 3, [1, 1, 2]) == [3, 3, 6]


def test_a_cut_by_hand_is_what_was_written():
    assert by_hand("4,4,3,5", 16, 4) == [4, 4, 3, 5] and by_hand(" 1, 2", 3, 2) == [1, 2] and by_hand("7", 7, 1) == [7]


@pytest.mark.parametrize("text, found", [
    ("4,4,3,4", "4 that add up to 15"), ("8,8", "2 that add up to 16"), ("0,4,4,8", "4 that add up to 16"),
    ("4,4,-3,5", "4 that add up to 13"), ("4,4,,8", "4 that add up to 16"), ("", "1 that add up to 0"),
    ("4,4,4,4.0", "4 that add up to 12"), ("4,4,4,4,0", "5 that add up to 16"),
])
def test_a_cut_by_hand_that_does_not_fit_is_refused_with_one_that_does(text, found):
    with pytest.raises(ConfigError) as caught:
        by_hand(text, 16, 4)
    assert caught.value.law == f"A partition by hand is 4 numbers of at least 1 that add up to 16 units, but {text!r} is {found}."
    assert caught.value.way_out == "Write 4,4,4,4, for example."


@pytest.mark.parametrize("cut", [lambda: balanced([1.0, 2.0, 3.0], 4), lambda: by_hand("1,1,1,0", 3, 4)])
def test_more_parts_than_units_are_refused(cut):
    with pytest.raises(ConfigError) as caught:
        cut()
    assert caught.value.law == ("Every part of a pipeline needs a unit of the model, but there are 3 units for 4 parts "
                                "(stages x chunks).")
    assert caught.value.way_out == "Lower --pp or pipeline.chunks to at most 3 parts, or raise model.layers."
