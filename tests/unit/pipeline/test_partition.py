"""Cuts of a model: as even as every other cut, and refused where there is none."""

from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.layers.base import Parameter, Unit, normal
from mpitrain.machine.backend import Arena
from mpitrain.ops.device import backend_for
from mpitrain.pipeline.partition import balanced, by_time, cut, explicit, unit_seconds


def times(counts, costs, speeds):
    """What each chunk takes."""
    bounds = pairwise([0, *accumulate(counts)])
    return [
        sum(costs[start:stop]) / speed for (start, stop), speed in zip(bounds, speeds, strict=True)
    ]


def all_cuts(units, parts):
    """Every way to give each of the parts some units, in order."""
    return [
        [stop - start for start, stop in pairwise((0, *cut, units))]
        for cut in combinations(range(1, units), parts - 1)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_has_a_faster_slowest_part_and_none_as_fast_is_more_even(seed):
    draw = np.random.default_rng(seed)
    units = int(draw.integers(1, 10))
    parts = int(draw.integers(1, min(units, 5) + 1))
    costs, speeds = (
        draw.integers(0, 9, units).tolist(),
        draw.choice([1.0, 2.0, 4.0], parts).tolist(),
    )

    def badness(counts):
        found = times(counts, costs, speeds)
        return max(found), sum(time**2 for time in found)

    counts = balanced(costs, parts, speeds)
    assert sum(counts) == units and len(counts) == parts and min(counts) >= 1
    assert badness(counts) == min(map(badness, all_cuts(units, parts)))


@pytest.mark.parametrize(
    "costs, parts, counts",
    [
        ([1] * 10, 4, [2, 2, 3, 3]),
        ([5, 1, 1, 1, 1, 1, 5], 3, [1, 5, 1]),
        ([0.0] * 3, 3, [1, 1, 1]),
        ([7.5], 1, [1]),
    ],
)
def test_parts_are_even(costs, parts, counts):
    assert balanced(costs, parts) == counts


def test_a_stage_of_twice_the_speed_gets_twice_the_units():
    assert balanced([1] * 9, 2, [2, 1]) == [6, 3] and balanced([1] * 12, 3, [1, 1, 2]) == [3, 3, 6]


def test_a_cut_by_hand_is_what_was_written():
    assert (
        explicit("4,4,3,5", 16, 4) == [4, 4, 3, 5]
        and explicit(" 1, 2", 3, 2) == [1, 2]
        and explicit("7", 7, 1) == [7]
    )


@pytest.mark.parametrize(
    "text, found",
    [
        ("4,4,3,4", "4 that add up to 15"),
        ("8,8", "2 that add up to 16"),
        ("0,4,4,8", "4 that add up to 16"),
        ("4,4,-3,5", "4 that add up to 13"),
        ("4,4,,8", "4 that add up to 16"),
        ("", "1 that add up to 0"),
        ("4,4,4,4.0", "4 that add up to 12"),
        ("4,4,4,4,0", "5 that add up to 16"),
    ],
)
def test_a_cut_by_hand_that_does_not_fit_is_refused_with_one_that_does(text, found):
    with pytest.raises(ConfigError) as caught:
        explicit(text, 16, 4)
    assert (
        caught.value.law
        == f"A partition by hand is 4 numbers of at least 1 that add up to 16 units, but {text!r} is {found}."
    )
    assert caught.value.way_out == "Write 4,4,4,4, for example."


@pytest.mark.parametrize(
    "cut", [lambda: balanced([1.0, 2.0, 3.0], 4), lambda: explicit("1,1,1,0", 3, 4)]
)
def test_more_parts_than_units_are_refused(cut):
    with pytest.raises(ConfigError) as caught:
        cut()
    assert caught.value.law == (
        "Every chunk of a pipeline needs a unit of the model, but there are 3 units for 4 chunks (stages x chunks)."
    )
    assert (
        caught.value.way_out
        == "Lower --pp or pipeline.chunks to at most 3 chunks, or raise model.layers."
    )


class Clock:
    """Seconds that pass only where a layer says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Slow:
    """A layer (rows, width) -> (rows, width + 1) whose forward, input half and weight half take so long; the first use twice."""

    def __init__(self, clock, *seconds):
        self.clock, self.seconds, self.used = clock, seconds, 0

    def parameters(self):
        return [Parameter("gain", (3,), normal(1.0), True)]

    def output_shape(self, shape):
        return (*shape[:-1], shape[-1] + 1)

    def forward(self, w, x, now, arena):
        self.used += 1
        self.clock.now += self.seconds[0] * (1 + (self.used == 1))
        assert (w["gain"].shape, w["gain"].dtype, x.dtype) == ((3,), np.float16, np.float16)
        return arena.take(self.output_shape(x.shape), x.dtype), x.shape

    def backward_input(self, w, dy, saved, arena):
        self.clock.now += self.seconds[1]
        assert (dy.shape, dy.dtype) == (self.output_shape(saved), np.float16)
        return np.zeros(saved), dy

    def backward_weight(self, pending, dw, arena):
        self.clock.now += self.seconds[2]
        assert not dw["gain"].claim() and dw["gain"].array.dtype == np.float32


def test_units_are_timed_forward_and_backward_after_a_warm_up():
    """In the types in which they are trained: here with a mirror of 16 bits, and gradients of 32."""
    clock, arena = Clock(), Arena()

    def loss(y):
        clock.now += 0.5
        assert y.shape == (2, 7)
        return y

    units = [
        Unit(f"slow.{i}", Slow(clock, i, 10.0 * i, 100.0 * i), {"gain": "slow.0.gain"} if i else {})
        for i in range(3)
    ]
    times = unit_seconds(
        units,
        np.zeros((2, 4), np.float16),
        loss,
        backend_for("cpu"),
        arena,
        "float32",
        "float16",
        clock,
    )
    seconds = [(0.0, False), (111.0, False), (222.5, False)]
    assert [*times] == seconds and arena.live == 0


@pytest.mark.parametrize(
    "passes, seconds, is_doubtful",
    [([9, 5, 5.4], 5, False), ([9, 5, 7, 8, 5.4], 5, False), ([9, 5, 7, 8, 6, 7, 1], 5, True)],
)
def test_passes_that_disagree_are_repeated_and_doubtful_if_they_never_agree(
    passes, seconds, is_doubtful
):
    left = iter(passes)

    class Disturbed(Slow):
        def forward(self, w, x, now, arena):
            self.clock.now += next(left)
            return super().forward(w, x, now, arena)

    clock = Clock()
    units = [Unit("a", Disturbed(clock, 0, 0.0, 0.0), {}), Unit("b", Slow(clock, 0, 0.0, 0.0), {})]
    x, backend = np.zeros((2, 4), np.float16), backend_for("cpu")
    arguments = (lambda y: y), backend, Arena(), "float32", "float16", clock
    first, second = unit_seconds(units, x, *arguments, wanted=[0])
    assert (first, second) == ((seconds, is_doubtful), None)


def test_a_stage_is_as_fast_as_its_slowest_rank_and_has_units_accordingly():
    units = [1.0, 1.0, 2.0, 1.0, 1.0, 2.0, 1.0]
    seconds = [
        [speed * unit for unit in units] for speed in (1, 1, 1, 2)
    ]  # rank 3 takes twice as long
    assert by_time(seconds, [0, 0, 1, 1], (0, 1)) == [5, 2]
    assert by_time(seconds[:3], [0, 0, 1], (0, 1)) == [3, 4]
    assert by_time(seconds, [0, 0, 1, 1], (0, 1, 1, 0)) == [3, 1, 1, 2]


def test_a_trainer_of_own_units_says_that_it_is_not_cut_by_time():
    with pytest.raises(ConfigError, match="A Trainer of your"):
        cut([], 2, "time")
