"""Schedules against their published formulas, over stages, micro-batches and chunks; no ranks, no clock.

Units: a chunk's forward, input half and weight half take 1 each, so that all times are whole numbers.
"""

import itertools
from collections import Counter, defaultdict
from fractions import Fraction
from functools import cache
from itertools import product

import pytest

from mpitrain.errors import ConfigError
from mpitrain.pipeline.schedule_files import check
from mpitrain.pipeline.schedules import (
    KINDS,
    SCHEDULES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Complete,
    Forward,
    Handoff,
    Plan,
    Receive,
    Send,
    fused_at_the_input,
    plan_of,
    with_messages,
    with_whole_backwards,
    without_backward,
)
from mpitrain.pipeline.simulate import Cost, Event, goes_in_passes, peak, simulate

pytestmark = pytest.mark.slow


MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 15, 16)
GRID = dict.fromkeys((1, 2, 3, 4, 5, 8), MICRO_BATCHES) | {6: (1, 5, 6, 12), 7: (1, 6, 7, 8, 14)}
"""{stages: numbers of micro-batches}: 1, primes, powers of two, neighbours and multiples of every p."""


def points(name):
    """(stages p, micro-batches m, chunks v) that a schedule serves."""
    schedule = SCHEDULES[name]
    return [
        (p, m, v)
        for p, counts in GRID.items()
        for m, v in product(counts, [schedule.chunks] if schedule.chunks else [1, 2, 3])
        if not (schedule.grouped and m % p)
    ]


def few(name):
    """Those of at most 4 stages: for claims that cost several simulations each."""
    return [(p, m, v) for p, m, v in points(name) if p <= 4 and m in (1, 2, 3, 4, 7, 8)]


planned = cache(plan_of)


@cache
def programs(name, p, m, v):
    """The instructions of each stage of a plan, messages included."""
    return with_messages(planned(name, p, m, v))


@cache
def simulated(name, p, m, v):
    return simulate(programs(name, p, m, v), [Cost()] * p * v)


def share(simulation, p):
    """The bubble as an exact fraction."""
    return 1 - Fraction(simulation.busy, p * simulation.makespan)


def differing(name, measured, formula):
    """Where a measure of a schedule is not what the formula says."""
    return {
        point: (measured(*point), formula(*point))
        for point in points(name)
        if measured(*point) != formula(*point)
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_plan_is_complete_and_cannot_deadlock(name):
    assert points(name)
    for p, m, v in points(name):
        plan = planned(name, p, m, v)
        assert len(plan.stage_of) == p * v and len(plan.by_stage) == p
        check(plan, name, m)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_program_without_first_backwards_ends(name):
    for p, m, v in few(name):
        parts = len(planned(name, p, m, v).stage_of)
        for first in {0, 1 % parts, parts // 2, parts - 1}:
            program = with_messages(fused_at_the_input(planned(name, p, m, v), first))
            found = without_backward(program, first)
            simulation = simulate(found, [Cost()] * parts)
            assert not simulation.waits, (p, m, v, first)
            assert first or found == program
            done = Counter(
                (type(i).__name__, i.chunk) for mine in found for i in mine if i.chunk < first
            )
            halves = {"Backward", "BackwardInput", "BackwardWeight"}
            assert all(done["Forward", chunk] == done["Skip", chunk] == m for chunk in range(first))
            assert not any(kind in halves for kind, _ in done)
            for mine in found:
                messages = [i for i in mine if isinstance(i, Send | Receive | Complete | Handoff)]
                assert all(i.what == "activation" or i.chunk >= first for i in messages)
                sent = Counter(i[:3] for i in messages if isinstance(i, Send))
                assert sent == Counter(i[:3] for i in messages if isinstance(i, Complete))


@pytest.mark.parametrize("name", SCHEDULES)
def test_sends_pair_with_receives_in_order_and_none_goes_to_its_own_stage(name):
    for p, m, v in points(name):
        ends = {Send: defaultdict(list), Receive: defaultdict(list), Complete: defaultdict(list)}
        handed = 0
        for stage, mine in enumerate(programs(name, p, m, v)):
            for instruction in mine:
                if type(instruction) in ends:
                    what, chunk, micro, peer = instruction
                    assert peer != stage
                    way = (peer, stage) if isinstance(instruction, Receive) else (stage, peer)
                    ends[type(instruction)][*way, what, chunk].append(micro)
                handed += isinstance(instruction, Handoff)
        assert ends[Send] == ends[Receive] == ends[Complete]
        assert all(micros == list(range(m)) for micros in ends[Send].values())
        assert sum(map(len, ends[Send].values())) + handed == 2 * m * (p * v - 1), (
            "an activation and a gradient a boundary"
        )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_send_completes_before_the_backward_that_proves_it(name):
    for p, m, v in points(name):
        program = programs(name, p, m, v)
        for mine in program:
            sent, most = set(), 0
            for i in mine:
                match i:
                    case Send():
                        sent.add(i[:3])
                    case Complete(what, chunk, micro):
                        sent.remove((what, chunk, micro))
                    case BackwardInput(chunk, micro) | Backward(chunk, micro):
                        assert ("activation", chunk + 1, micro) not in sent
                most = max(most, len(sent))
            assert not sent
            if name in ("1f1b", "zero-bubble"):
                assert most <= 2 * p, (
                    "in the steady state no send is kept for longer than the pipeline is deep"
                )
        if m < 6:
            last = [
                [
                    *(i for i in mine if not isinstance(i, Complete)),
                    *(i for i in mine if isinstance(i, Complete)),
                ]
                for mine in program
            ]
            costs = [Cost(1, 2, 3)] * p * v
            assert simulate(program, costs, 0.5, 0.25) == simulate(last, costs, 0.5, 0.25)


def test_the_halves_of_the_first_part_are_one_where_they_follow_each_other():
    assert fused_at_the_input(plan_of("1f1b", 1, 5)) == plan_of("naive", 1, 5)
    for name in ("1f1b", "zero-bubble"):
        whole, fused = plan_of(name, 3, 4), fused_at_the_input(plan_of(name, 3, 4))
        assert fused.by_stage[1:] == whole.by_stage[1:]
        assert {*map(type, fused.by_stage[0])} == {Forward, Backward}


BUBBLES = {
    "naive": lambda p, m, v: Fraction(p - 1, p),
    "gpipe": lambda p, m, v: Fraction(p - 1, m + p - 1),
    "1f1b": lambda p, m, v: Fraction(2 * (p - 1), 3 * m + 2 * (p - 1)),
    "interleaved": lambda p, m, v: Fraction(p - 1, v * m + p - 1),
}

TOTALS = {
    "zero-bubble": lambda p, m, v: 3 * m + max(p - 1, 2 * p - 1 - m),
    "zb-v": lambda p, m, v: 6 * m + max(p - 1, 2 * (2 * p - 1 - m)),
    "v-half": lambda p, m, v: (
        6 * m
        + (
            max(Fraction(7 * (p - 1), 2), 4 * p - 3 - m)
            if p % 2
            else 4 * (p - 1)
            if m == 1
            else max(Fraction(7 * p - 4, 2), 4 * p - 1 - m)
        )
    ),
    "breadth-first": lambda p, m, v: 3 * max(v * m + p - 1, v * p + m - 1),
}


@pytest.mark.parametrize("name", BUBBLES)
def test_the_bubble_is_that_of_the_formula(name):
    assert differing(name, lambda p, m, v: share(simulated(name, p, m, v), p), BUBBLES[name]) == {}


@pytest.mark.parametrize("name", TOTALS)
def test_the_makespan_is_that_of_the_formula(name):
    assert differing(name, lambda p, m, v: simulated(name, p, m, v).makespan, TOTALS[name]) == {}


def test_the_bubble_is_what_is_not_busy():
    found = simulated("1f1b", 4, 8, 1)
    assert (found.makespan, found.busy, found.bubble) == (30, 96, pytest.approx(0.2, abs=1e-15))
    whole = simulate(with_messages(with_whole_backwards(plan_of("1f1b", 4, 8))), [Cost()] * 4)
    assert whole.makespan == 33, "gradients that leave before W save a third of 9"


LIVE = {
    "naive": lambda s, p, m, v: 1,
    "gpipe": lambda s, p, m, v: m,
    "1f1b": lambda s, p, m, v: min(p - s, m),
    "interleaved": lambda s, p, m, v: min(2 * (p - 1 - s) + (v - 1) * p + 1, v * m),
    "zero-bubble": lambda s, p, m, v: min(p, m),
    "zb-v": lambda s, p, m, v: min(m + 1 + s, 2 * m, 2 * p),
    "v-half": None,
    "breadth-first": lambda s, p, m, v: v * m,
}


def test_every_schedule_has_formulas_of_its_bubble_and_its_memory():
    assert {*BUBBLES, *TOTALS} == {*LIVE} == {*SCHEDULES}


@pytest.mark.parametrize("name", [name for name, formula in LIVE.items() if formula])
def test_peak_live_micro_batches_are_those_of_the_formula(name):
    for p, m, v in points(name):
        found = [peak(mine, [Cost()] * p * v).live for mine in planned(name, p, m, v).by_stage]
        assert found == [LIVE[name](s, p, m, v) for s in range(p)], (p, m, v)


def test_v_half_holds_half_of_what_1f1b_holds():
    for p, m, _ in points("v-half"):
        stages = [
            Fraction(peak(mine, [Cost()] * 2 * p).live, 2)
            for mine in planned("v-half", p, m, 2).by_stage
        ]
        assert max(stages) == min(p // 2 + 1, m), (p, m)


def test_pending_weight_halves_of_zero_bubble_grow_with_the_stage():
    for p, m, _ in points("zero-bubble"):
        found = [peak(mine, [Cost()] * p) for mine in planned("zero-bubble", p, m, 1).by_stage]
        assert [each.pending for each in found] == [min(s + 1, m) for s in range(p)]
        assert [each.whole for each in found] == [min(p - s, m) for s in range(p)]


def test_peak_bytes_count_saved_and_pending_activations():
    costs = [Cost(saved=100, pending=30), Cost(saved=10, pending=3)]
    mine = [
        Forward(0, 0),
        Forward(0, 1),
        BackwardInput(0, 0),
        Forward(1, 0),
        BackwardInput(0, 1),
        BackwardWeight(0, 0),
        Backward(1, 0),
        BackwardWeight(0, 1),
    ]
    assert [peak(mine[:end], costs).nbytes for end in range(9)] == [
        0,
        100,
        200,
        200,
        200,
        200,
        200,
        200,
        200,
    ]
    assert peak(
        [Forward(0, 0), Backward(0, 0), Forward(0, 1), BackwardInput(0, 1), *[Forward(1, 0)] * 9],
        costs,
    ) == (10, 9, 1, 120)


GATHERS = {
    "gpipe": lambda p, m, v: [1] * p,
    "1f1b": lambda p, m, v: [1] * p,
    "breadth-first": lambda p, m, v: [2 * v - 1] * p,
}


def turns(instructions):
    """How often a stage begins with or switches to a chunk: ZeRO gathers, if it holds one at a time."""
    return sum(1 for _ in itertools.groupby(i.chunk for i in instructions))


@pytest.mark.parametrize("name", GATHERS)
def test_zero_gathers_as_often_as_the_formula_says(name):
    assert (
        differing(
            name,
            lambda p, m, v: [turns(mine) for mine in planned(name, p, m, v).by_stage],
            GATHERS[name],
        )
        == {}
    )


def test_two_schedules_alone_are_breadth_first():
    for name in SCHEDULES:
        found = {
            all(map(goes_in_passes, planned(name, p, m, v).by_stage))
            for p, m, v in points(name)
            if p > 1 and 1 < m < 7
        }
        assert found == {name in ("gpipe", "breadth-first")}, name


# What a message that travels beside computing adds to the makespan, in units of its time, for p >= 2 and times up to half a
# forward: longer ones lie on longer paths. That of zb-v holds from m = 2p - 1 on, where its steady state begins. That of
# v-half is what this simulator finds; the others were known before.
TRANSFERS = {
    "naive": lambda p, m, v: 2 * m * (p - 1),
    "gpipe": lambda p, m, v: 2 * (p - 1),
    "1f1b": lambda p, m, v: 2 * (p - 1),
    "zero-bubble": lambda p, m, v: 2 * (p - 1 + max(0, min(m - 2, p - 1))),
    "interleaved": lambda p, m, v: 2 * (v * p - 1),
    "zb-v": lambda p, m, v: 5 * p - 7,
    "v-half": lambda p, m, v: 4 * (p - 1) + 2 * min(m - 1, p // 2),
}


def added(name, p, m, v):
    """What transfers of 1 add where each half takes 2."""
    program, costs = programs(name, p, m, v), [Cost(2, 2, 2)] * p * v
    return simulate(program, costs, 1).makespan - simulate(program, costs).makespan


@pytest.mark.parametrize("name", TRANSFERS)
def test_a_transfer_costs_what_the_formula_says(name):
    served = [
        (p, m, v) for p, m, v in points(name) if p > 1 and not (name == "zb-v" and m < 2 * p - 1)
    ]
    assert (
        served
        and {
            point: found
            for point in served
            if (found := added(name, *point)) != TRANSFERS[name](*point)
        }
        == {}
    )


@pytest.mark.parametrize(
    "name, ratio",
    [("fused", 1.438), ("1f1b", 1.335), ("zero-bubble", 1.233), ("zb-v", 1.095), ("v-half", 1.349)],
)
def test_unequal_halves_take_what_was_published(name, ratio):
    plan = with_whole_backwards(plan_of("1f1b", 8, 16)) if name == "fused" else plan_of(name, 8, 16)
    v = len(plan.stage_of) // 8
    found = simulate(with_messages(plan), [Cost(1 / v, 1.3 / v, 0.7 / v)] * 8 * v)
    assert found.makespan / (3 * 16) == pytest.approx(ratio, abs=5e-4)


def blocking(plan):
    """What one would write first: receive just before use, and go on from a send when it has arrived."""
    return tuple(
        tuple(
            done
            for i in mine
            if not isinstance(i, Complete)
            for done in ([i, Complete(*i)] if isinstance(i, Send) else [i])
        )
        for mine in with_messages(plan, ahead=0)
    )


def test_a_deadlock_names_where_every_stage_waits():
    assert simulate(blocking(plan_of("1f1b", 3, 4)), [Cost()] * 3).waits == (
        "stage 0 waits until stage 1 receives the activation of micro-batch 2 for chunk 1",
        "stage 1 waits until stage 2 receives the activation of micro-batch 1 for chunk 2",
        "stage 2 waits until stage 1 receives the gradient of micro-batch 0 for chunk 1",
    )
    crossed = Plan(
        (0, 1),
        (
            (Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1)),
            (Forward(1, 0), Forward(1, 1), Backward(1, 0), Backward(1, 1)),
        ),
    )
    assert simulate(with_messages(crossed), [Cost()] * 2).waits == (
        "stage 0 waits for the gradient of micro-batch 0 for chunk 0, from stage 1",
        "stage 1 waits for the activation of micro-batch 1 for chunk 1, from stage 0",
    )


def test_a_message_starts_when_both_ends_have_begun():
    plan = Plan(
        (0, 1),
        (
            (Forward(0, 0), Forward(0, 1), Backward(0, 0), Backward(0, 1)),
            (Forward(1, 0), Backward(1, 0), Forward(1, 1), Backward(1, 1)),
        ),
    )
    costs = [Cost(1, 2, 3), Cost(10, 20, 30)]
    first, last = simulate(with_messages(plan), costs, transfer=4, receive=0.5).timeline
    assert first == (
        Event(0, 1, Forward(0, 0)),
        Event(1, 2, Forward(0, 1)),
        Event(70, 75, Backward(0, 0)),
        Event(130.5, 135.5, Backward(0, 1)),
    )
    assert last == (
        Event(5.5, 15.5, Forward(1, 0)),
        Event(15.5, 65.5, Backward(1, 0)),
        Event(66, 76, Forward(1, 1)),
        Event(76, 126, Backward(1, 1)),
    )


def test_an_eager_message_travels_before_its_receive_is_posted():
    """Stage 1 posts the receive of the third activation when the first forward there has ended, at 12."""
    program, costs = with_messages(plan_of("gpipe", 2, 4)), [Cost()] * 2
    starts = {
        is_eager: [
            event.start for event in simulate(program, costs, 10, is_eager=is_eager).timeline[1][:4]
        ]
        for is_eager in (False, True)
    }
    assert starts == {False: [11, 12, 22, 23], True: [11, 12, 13, 14]}


@pytest.mark.parametrize("name", SCHEDULES)
def test_eager_messages_are_never_later_and_free_ones_are_as_fast(name):
    for p, m, v in few(name):
        program, costs = programs(name, p, m, v), [Cost()] * p * v
        for transfer in (0, 0.5, 5):
            eager, other = (
                simulate(program, costs, transfer, 0.25, is_eager).makespan
                for is_eager in (True, False)
            )
            assert eager == other if transfer == 0 else eager <= other, (p, m, v, transfer)


def test_host_overhead_precedes_each_instruction_and_is_not_compute():
    for m in (1, 4):
        program = with_messages(plan_of("1f1b", 1, m))
        plain, slow = (simulate(program, [Cost()], overhead=overhead) for overhead in (0, 0.25))
        assert (slow.makespan, slow.busy) == (plain.makespan + 0.25 * (3 * m - 1), plain.busy)


def test_a_receive_that_begins_late_is_a_message_that_travels_late():
    plan = plan_of("gpipe", 2, 2)
    costs = [Cost(1, 1, 1), Cost(5, 1, 1)]
    early, late = (
        simulate(with_messages(plan, ahead), costs, transfer=1).makespan for ahead in (1, 0)
    )
    assert late > early


@pytest.mark.parametrize(
    "arguments, law, way_out",
    [
        (
            ("2f2b", 2, 2),
            "The schedule must be one of naive, gpipe, 1f1b, interleaved, zero-bubble, zb-v, v-half, breadth-first, "
            "async, async-2bw, or a file, but '2f2b' is neither.",
            "",
        ),
        (
            ("1f1b", 0, 2),
            "A pipeline has at least 1 stage, 1 micro-batch and 1 chunk a stage, but these are 0, 2 and 1.",
            "",
        ),
        (
            ("breadth-first", 4, 8, 0),
            "A pipeline has at least 1 stage, 1 micro-batch and 1 chunk a stage, but these are 4, 8 and 0.",
            "",
        ),
        (
            ("zb-v", 4, 8, 3),
            "Schedule zb-v has 2 chunk(s) a stage, but 3 were asked for.",
            "Leave the number of chunks out, or take one of interleaved, breadth-first.",
        ),
        (
            ("1f1b", 4, 8, 2),
            "Schedule 1f1b has 1 chunk(s) a stage, but 2 were asked for.",
            "Leave the number of chunks out, or take one of interleaved, zb-v, v-half, breadth-first.",
        ),
        (
            ("interleaved", 4, 6),
            "Schedule interleaved takes as many micro-batches at a time as there are stages, but 4 stages do not "
            "divide 6 micro-batches.",
            "Take 4 or 8 micro-batches, or schedule 1f1b or breadth-first, which serve any number.",
        ),
        (
            ("interleaved", 4, 3),
            "Schedule interleaved takes as many micro-batches at a time as there are stages, but 4 stages do not "
            "divide 3 micro-batches.",
            "Take 4 micro-batches, or schedule 1f1b or breadth-first, which serve any number.",
        ),
    ],
)
def test_numbers_unfit_for_a_schedule_are_refused_with_fitting_ones(arguments, law, way_out):
    with pytest.raises(ConfigError) as caught:
        plan_of(*arguments)
    assert (caught.value.law, caught.value.way_out) == (law, way_out)


@pytest.mark.parametrize(
    "mine, name, most",
    [
        ("F0", "forward_bytes", 30),
        ("F0 F1", "forward_bytes", 40),
        ("F0 B0", "input_bytes", 30),
        ("F0 F1 B0", "input_bytes", 40),
        ("F0 BW0", "input_bytes", 30),
        ("F0 F1 BW0", "input_bytes", 40),
        ("F0 B0 W0", "weight_bytes", 30),
        ("F0 F1 B0 W0", "weight_bytes", 40),
        ("F0 F1 F2 F3 F4 B0", "input_bytes", 70),
    ],
)
def test_peak_bytes_include_the_running_instruction(mine, name, most):
    """The last instruction of each list holds 30 bytes, and each other micro-batch the 10 that it has saved."""
    instructions = [KINDS[word[:-1]](0, int(word[-1])) for word in mine.split()]
    assert peak(instructions, [Cost(saved=10, pending=4, **{name: 30})]).nbytes == most
