"""The cost model, the choice it leads to, and fitting it: no ranks, no clock."""

import json
import math
from itertools import pairwise, product

import pytest

from mpitrain.collectives.direct import SMALL
from mpitrain.collectives.group import chosen
from mpitrain.collectives.selection import cost_model
from mpitrain.collectives.selection.algorithm import Topology
from mpitrain.collectives.selection.cost_model import (
    EAGER,
    KNOTS,
    MEMORY,
    Level,
    Tuning,
    candidates,
    choose,
    is_whole,
    level_of,
    part_bytes,
    plans_of,
    predict,
    shares,
    work,
)
from mpitrain.collectives.selection.table import ALL_REDUCE, TABLES
from mpitrain.collectives.selection.tuning import DEFAULT, read_tuning, write_tuning
from mpitrain.errors import ConfigError
from mpitrain.tools.bench.collectives.fit import (
    check,
    decided,
    described,
    fit,
    levels_seen,
    link_seconds,
)
from mpitrain.tools.bench.collectives.sweep import CollectiveRow, sizes

ONE_HOST = ("a",) * 4
FOUR_HOSTS = ("a", "b", "c", "d")
MACHINE = {"hosts": 1, "cores": 2}
MANY = 100  # cores
WHOLE = [name for name in ALL_REDUCE if is_whole("allreduce", name)]


def row(algorithm, nbytes, microseconds, buffers="plain"):
    facts = "allreduce", algorithm, buffers, nbytes, nbytes // 4, "float32", 4, microseconds
    return CollectiveRow(*facts, *[0] * 6, algorithm, math.nan, 1)


def rows_of(tuning, hosts, memory):
    """What a machine with these constants would measure."""
    return [
        row(
            name,
            nbytes,
            1e6 * predict(tuning, "allreduce", name, hosts, nbytes // 4, 4, memory),
            memory,
        )
        for nbytes in sizes(1 << 6, 1 << 26, 2)
        for name in candidates(Topology(hosts))
    ]


@pytest.mark.parametrize("n", range(1, 10))
def test_the_busiest_rank_moves_what_the_formulas_say(n):
    count, width = 2520 * 8, 4
    nbytes, hosts = count * width, ("a",) * n
    lg = math.ceil(math.log2(n))
    ring = work("allreduce", "ring", hosts, count, width, MANY)  # in one segment
    assert (ring.host_messages, ring.host_bytes) == (
        4 * (n - 1),
        2 * nbytes * (n - 1) // n,
    )  # sent and received
    assert ring.reduced_bytes == nbytes * (n - 1) // n
    assert ring.net_messages == ring.net_bytes == 0
    assert (
        work("allreduce", "star", hosts, count, width, MANY).host_bytes == 2 * (n - 1) * nbytes
    )  # in, then out
    assert work("broadcast", "binomial", hosts, count, width, MANY).host_bytes == lg * nbytes
    assert (
        work("all-to-all", "pairwise", hosts, count, width, MANY).host_bytes
        == nbytes * (n - 1) // n
    )


def test_messages_between_hosts_are_counted_apart():
    apart = work("allreduce", "ring", FOUR_HOSTS, 4000, 4, MANY)
    assert (apart.host_messages, apart.net_messages, apart.net_bytes) == (0, 6, 24000)
    two_levels = work("allreduce", "hierarchical", ("a", "a", "b", "b"), 4000, 4, MANY)
    assert two_levels.net_bytes == 16000  # two columns of half the array, each sent twice by halves
    assert (
        work("allreduce", "ring", ("a", "a", "b", "b"), 4000, 4, MANY).net_bytes == 24000
    )  # one rank of two sends on
    assert (
        work("allreduce", "halving-doubling", ("a", "a", "b", "b"), 4000, 4, MANY).net_bytes
        == 32000
    )
    assert two_levels.host_bytes == 16000


def test_a_message_longer_than_mpi_sends_at_once_is_counted_as_long():
    for count, messages in ((EAGER // 4, 0), (EAGER // 4 + 1, 2)):
        assert work("allreduce", "tree", ("a", "a"), count, 4, MANY).host_long == messages


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "halving-doubling", "hierarchical"])
@pytest.mark.parametrize(
    "hosts", [list("abcdefg"), list("aabbccdd"), list("aaabbbcccdddeee"), list("abcdabcd")]
)
def test_one_segment_of_a_long_array_tells_of_all_and_a_few_hosts_of_many(
    algorithm, hosts, monkeypatch
):
    made = []
    monkeypatch.setattr(cost_model, "plans_of", lambda *a: made.append(plans_of(*a)) or made[-1])
    counts = (0, 1, 70_000, 1_000_003, 9_000_001)
    short = [work("allreduce", algorithm, hosts, count, 4, 2) for count in counts]
    assert max(len(plan.steps) for plans in made for plan in plans) <= 2 * len(hosts), (
        "as long as of one segment"
    )
    monkeypatch.setattr(cost_model, "_segments", lambda *a: 1)
    monkeypatch.setattr(cost_model, "ENDS", len(hosts))
    for count, seen in zip(counts, short, strict=True):
        assert seen == pytest.approx(
            work("allreduce", algorithm, hosts, count, 4, 2), rel=2e-3, abs=1e-2 * count
        )


def test_ranks_that_share_cores_take_turns():
    alone, crowded = (work("allreduce", "ring", ONE_HOST, 4000, 4, cores) for cores in (4, 2))
    assert crowded == alone._replace(
        host_messages=24, host_long=0, host_bytes=48000, reduced_bytes=24000
    )
    assert work("allreduce", "star", ONE_HOST, 4000, 4, 2) == work(
        "allreduce", "star", ONE_HOST, 4000, 4, 4
    ), "all wait for one"
    assert work("allreduce", "ring", FOUR_HOSTS, 4000, 4, 1) == work(
        "allreduce", "ring", FOUR_HOSTS, 4000, 4, 4
    )


def tuning_of(hosts, plans, whole):
    """The tuning of one level."""
    return Tuning(
        MACHINE | {"hosts": hosts}, {"network" if hosts > 1 else "host": Level(plans, whole)}
    )


def constants_of(tuning):
    """The constants of its only level."""
    (level,) = tuning.levels.values()
    return level


def planted(hosts):
    """A tuning whose constants differ in everything that they may depend on."""

    def at(scale, *values):
        return {
            knot: tuple(value * scale * (1 + i / 4) for value in values)
            for i, knot in enumerate(KNOTS)
        }

    plans = {
        memory: at(scale, 1e-6, 2e-6, 2e-10, 3e-5, 1e-9, 1e-10)
        for scale, memory in enumerate(MEMORY, 1)
    }
    whole = {
        memory: {name: at(scale, 2e-6, 1e-10) for name in WHOLE}
        for scale, memory in enumerate(MEMORY, 1)
    }
    return tuning_of(len(set(hosts)), {4: plans}, {4: whole})


def test_planted_constants_predict_every_size_and_memory_again():
    truth = planted(ONE_HOST)
    rows = [row for memory in MEMORY for row in rows_of(truth, ONE_HOST, memory)]
    known = set(sizes(1 << 6, 1 << 26, 4))
    found = fit(MACHINE, ONE_HOST, [row for row in rows if row.bytes in known])
    for memory, checked in check(
        found, ONE_HOST, [row for row in rows if row.bytes not in known]
    ).items():
        assert checked.error < 0.01, memory
        assert all(ratio < 1.02 for _, ratio in checked.choices.values())
    for memory in MEMORY:
        for knot in KNOTS:
            for name in WHOLE:
                assert constants_of(found).whole[4][memory][name][knot] == pytest.approx(
                    constants_of(truth).whole[4][memory][name][knot], rel=1e-3
                )


def test_links_between_hosts_are_fitted_too():
    truth = planted(FOUR_HOSTS)
    found = fit(MACHINE | {"hosts": 4}, FOUR_HOSTS, rows_of(truth, FOUR_HOSTS, "plain"))
    for knot in KNOTS:
        assert constants_of(found).plans[4]["plain"][knot][3:5] == pytest.approx(
            constants_of(truth).plans[4]["plain"][knot][3:5], rel=0.02
        )
        assert (
            constants_of(found).plans[4]["plain"][knot][:3]
            == constants_of(DEFAULT).plans[2]["plain"][knot][:3]
        ), "nothing says anything about them"
    assert check(found, FOUR_HOSTS, rows_of(truth, FOUR_HOSTS, "plain"))["plain"].error < 0.01
    chosen, other = (
        choose(found, Topology(FOUR_HOSTS), 1 << 20, 4, memory) for memory in ("window", "plain")
    )
    assert chosen == other


def test_slow_links_extrapolate_from_shorter_arrays():
    """However noisy the longest ones were: constants at a size that was not measured must not follow from a difference."""
    slow = tuning_of(
        4,
        {4: {"plain": dict.fromkeys(KNOTS, (0, 0, 0, 1e-3, 4e-8, 0))}},
        {4: {"plain": {"native": dict.fromkeys(KNOTS, (3e-3, 8e-8))}}},
    )
    measured = [
        r._replace(time_us=r.time_us * (1.1 if i % 3 == 1 else 1))
        for i, r in enumerate(rows_of(slow, FOUR_HOSTS, "plain"))
        if r.bytes <= 1 << 22
    ]
    found = fit(MACHINE | {"hosts": 4}, FOUR_HOSTS, measured)
    for name in ("ring", "tree", "native"):
        truth, predicted = (
            predict(t, "allreduce", name, FOUR_HOSTS, 1 << 24, 4) for t in (slow, found)
        )
        assert predicted == pytest.approx(truth, rel=0.15), name


TWO_HOSTS = ("a", "b")
LINK = 4e-8  # seconds per byte


def two_hosts(late, least=1 << 6, most=1 << 21):
    """Rows of two hosts: a native all-reduce that takes `late` of its time where it takes longest."""
    link = dict.fromkeys(KNOTS, (0, 0, 0, 1e-3, LINK, 0))
    native = dict.fromkeys(KNOTS, (4e-3, LINK))
    machine = tuning_of(2, {2: {"plain": link}}, {2: {"plain": {"native": native}}})
    return [
        r._replace(time_us=r.time_us * late.get(r.bytes, 1.0)) if r.chosen == "native" else r
        for r in rows_of(machine, TWO_HOSTS, "plain")
        if least <= r.bytes <= most
    ]


@pytest.mark.parametrize("late", [{}, {1 << 19: 2.4, 1 << 20: 1.8, 1 << 21: 1.1}])
@pytest.mark.parametrize("most", [1 << 20, 1 << 21, 1 << 22])
def test_no_all_reduce_is_believed_faster_than_the_links_it_must_use(late, most):
    rows = two_hosts(late, most=most)
    assert link_seconds(TWO_HOSTS, rows, 2) == pytest.approx(LINK, rel=0.02)
    found = fit(MACHINE | {"hosts": 2}, TWO_HOSTS, rows)
    for knot in KNOTS:
        assert constants_of(found).plans[2]["plain"][knot][4] >= 0.98 * LINK
        assert constants_of(found).whole[2]["plain"]["native"][knot][1] >= 0.98 * LINK
    for nbytes in (1 << 23, 1 << 24, 1 << 26):
        assert choose(found, Topology(TWO_HOSTS), nbytes // 4, 4, "plain") != "native"


def test_an_algorithm_that_loses_at_the_largest_size_does_not_win_beyond_it():
    rows = [
        r._replace(time_us=3e4) if r.chosen == "native" else r._replace(min_us=r.time_us)
        for r in rows_of(planted(FOUR_HOSTS), FOUR_HOSTS, "plain")
        if r.bytes <= 1 << 22
    ]
    found = fit(MACHINE | {"hosts": 4}, FOUR_HOSTS, rows)
    for nbytes in (1 << 22, 1 << 24, 1 << 26, 1 << 30):
        assert choose(found, Topology(FOUR_HOSTS), nbytes // 4, 4, "plain") != "native"
    assert f"of 64 to {1 << 22} bytes decide" in decided(found, FOUR_HOSTS, rows)[-1]


def test_a_few_wild_measurements_change_little():
    truth = planted(ONE_HOST)
    rows = rows_of(truth, ONE_HOST, "plain")
    wild = [r._replace(time_us=r.time_us * (20 if i % 9 == 4 else 1)) for i, r in enumerate(rows)]
    assert check(fit(MACHINE, ONE_HOST, wild), ONE_HOST, rows)["plain"].error < 0.05


def test_a_fit_never_goes_below_zero():
    rows = [
        row(name, nbytes, 50.0)
        for nbytes in sizes(1 << 10, 1 << 26, 4)
        for name in candidates(Topology(ONE_HOST))
    ]
    found = fit(MACHINE, ONE_HOST, rows)
    assert all(
        constant >= 0
        for constants in constants_of(found).plans[4]["plain"].values()
        for constant in constants
    )


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("memory", MEMORY)
def test_predictions_are_continuous_and_never_fall_with_size_by_default(n, memory):
    for name in ("tree", "ring", *WHOLE):
        times = [
            predict(DEFAULT, "allreduce", name, ("a",) * n, 4 * (nbytes // 16), 4, memory)
            for nbytes in sizes(64, 1 << 26, 1.1)
        ]
        assert all(0.8 <= after / before <= 2.5 for before, after in pairwise(times)), name


@pytest.mark.parametrize("messages", [("sendrecv", "ping-pong"), ("shift", "ring")])
@pytest.mark.parametrize("n", [2, 4])
def test_by_default_no_message_is_faster_than_memory(n, messages):
    for power in range(18, 29):
        seconds = predict(DEFAULT, *messages, ("a",) * n, 1 << power, 4)
        assert 4 << power < 50e9 * seconds


@pytest.mark.parametrize(("n", "most"), [(2, 10e-6), (4, 40e-6)])
def test_by_default_a_short_array_is_left_to_what_needs_no_message(n, most):
    for memory in MEMORY:
        for nbytes in (64, 256, 1024):
            chosen = choose(DEFAULT, Topology(("a",) * n), nbytes // 4, 4, memory=memory)
            assert chosen in WHOLE
            assert predict(DEFAULT, "allreduce", chosen, ("a",) * n, nbytes // 4, 4, memory) < most


def test_constants_change_from_knot_to_knot_in_a_straight_line():
    assert shares(KNOTS[1]) == [0, 1, 0, 0, 0]
    assert shares(1) == [1, 0, 0, 0, 0] and shares(1 << 40) == [0, 0, 0, 0, 1]
    middle = shares(math.isqrt(KNOTS[1] * KNOTS[2]))
    assert middle == pytest.approx([0, 0.5, 0.5, 0, 0])


def test_the_choice_follows_hosts_and_sizes():
    assert choose(DEFAULT, Topology(ONE_HOST), 1 << 20, 4) == "shared"
    assert choose(DEFAULT, Topology(("a", "a", "b", "b")), 1 << 24, 4) == "hierarchical"
    assert choose(DEFAULT, Topology(FOUR_HOSTS, is_native=False), 4, 4) == "recursive-doubling"
    assert choose(DEFAULT, Topology(FOUR_HOSTS, is_native=False), 1 << 24, 2) in (
        "ring",
        "halving-doubling",
    )
    assert choose(DEFAULT, Topology(("a",)), 100, 4) in candidates(Topology(("a",)))


def test_shared_halves_are_chosen_by_hosts_and_memory():
    for operation in ("reduce-scatter", "all-gather"):

        def auto(hosts, operation=operation, **where):
            return chosen(DEFAULT, Topology(hosts, **where), 1 << 20, 4, "window", operation)

        assert auto(ONE_HOST) == "shared"
        assert auto(FOUR_HOSTS) == auto(FOUR_HOSTS, is_on_device=True) == "bruck"
        assert auto(("a", "a", "b", "b")) == auto(FOUR_HOSTS[:3]) == "ring"
        assert auto(ONE_HOST, is_on_device=True) == "shared"
        truth = planted(ONE_HOST)
        for nbytes in (0, 1 << 12, 1 << 26):
            half, whole, empty = (
                predict(truth, name, "shared", ONE_HOST, count, 4, "window")
                for name, count in (
                    (operation, nbytes // 4),
                    ("allreduce", nbytes // 4),
                    ("allreduce", 0),
                )
            )
            assert empty / 2 < half <= whole and half >= whole / 2
        assert predict(truth, operation, "shared", ONE_HOST, 0, 4) == predict(
            truth, "allreduce", "shared", ONE_HOST, 0, 4
        )


def linked(seconds_per_message, seconds_per_byte):
    """The default tuning with other links."""
    plans = {
        n: {
            memory: {
                knot: (*c[:3], seconds_per_message, seconds_per_byte, *c[5:])
                for knot, c in by_knot.items()
            }
            for memory, by_knot in by_memory.items()
        }
        for n, by_memory in constants_of(DEFAULT).plans.items()
    }
    return DEFAULT._replace(levels={"host": constants_of(DEFAULT)._replace(plans=plans)})


def test_segments_are_longer_for_latency_and_shorter_for_bandwidth():
    count, hosts = 1 << 22, ("a", "b")
    nbytes = 4 * count
    assert part_bytes(linked(1e-3, 4e-8), "ring", hosts, count, 4) == nbytes / 16
    for late, slow in ((1e-3, 4e-8), (3e-5, 1e-9)):
        part = part_bytes(linked(late, slow), "ring", hosts, count, 4)
        best = (
            nbytes * late / slow
        ) ** 0.5  # of k parts: (k + 1) x (latency + share of the bytes) is least
        assert best / 2 <= part <= 3 * best
        assert part_bytes(linked(100 * late, slow), "ring", hosts, count, 4) > part
        assert part_bytes(linked(late, 100 * slow), "ring", hosts, count, 4) < part
    for algorithm in ("auto", "native", "shared", "hierarchical"):
        assert 0 < part_bytes(DEFAULT, algorithm, ("a", "a", "b"), count, 4) <= nbytes


def test_a_tuning_file_comes_back_as_it_went_and_those_of_one_level_are_read(tmp_path):
    file, host = tmp_path / "tuning.json", DEFAULT.levels["host"]
    for levels in ({"host": host}, {"socket": host, "network": host}):
        write_tuning(file, DEFAULT._replace(levels=levels))
        assert read_tuning(file) == DEFAULT._replace(levels=levels)
    for hosts, level in ((1, "host"), (3, "network")):
        machine = DEFAULT.machine | {"hosts": hosts}
        file.write_text(json.dumps({"machine": machine, **host._asdict()}))
        assert read_tuning(file) == Tuning(machine, {level: host})
    level = {"plans": {"8": {"plain": {"4096": [1e-6] * 6}}}, "whole": {"8": {"plain": {}}}}
    file.write_text(json.dumps({"machine": MACHINE, "levels": {"host": level}}))
    plain = read_tuning(file).levels["host"].plans[8]["plain"]
    assert plain == dict.fromkeys(KNOTS, (1e-6,) * 6), "one size holds for all"


def test_the_constants_are_those_of_the_level_that_ranks_span():
    def level(seconds):
        plans = {2: {"plain": dict.fromkeys(KNOTS, (0, 0, seconds, 0, seconds, 0))}}
        return Level(plans, {2: {"plain": {"native": dict.fromkeys(KNOTS, (0, seconds))}}})

    every = {"socket": 1e-10, "host": 2e-10, "network": 4e-9}

    def seconds(measured, hosts, sockets, algorithm="ring"):
        tuning = Tuning(MACHINE, {name: level(every[name]) for name in measured})
        spanned = level_of(hosts, sockets)
        return predict(tuning, "allreduce", algorithm, hosts, 1 << 20, 4, level=spanned)

    ranks = {"socket": ("aa", "00"), "host": ("aa", "01"), "network": ("ab", "00")}
    for name, places in ranks.items():
        assert seconds(every, *places) == pytest.approx(every[name] * (1 << 22))
        assert seconds(every, *places, "native") == pytest.approx(every[name] * (1 << 22))
    assert seconds(["host", "network"], "aa", "00") == seconds(every, "aa", "01")
    assert seconds(["socket"], "ab", "00") == seconds(["socket"], "aa", "00")
    assert math.isnan(seconds(["socket", "host"], "ab", "00", "native"))


@pytest.mark.parametrize(
    "hosts, sockets, seen",
    [
        ("aabb", ["", "", "", ""], {"host": [0, 0, 1, 1], "network": [0, 0, 0, 0]}),
        ("aaaa", "0101", {"socket": [0, 1, 0, 1], "host": [0, 0, 0, 0]}),
        ("aaaa", "0000", {"socket": [0, 0, 0, 0]}),
        ("abb", ["", "", ""], {"network": [0, 0, 0]}),
        ("aa", ["", ""], {"host": [0, 0]}),
    ],
)
def test_a_job_shows_the_levels_that_its_first_rank_shares(hosts, sockets, seen):
    assert levels_seen(hosts, sockets) == seen


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"x": 1}',
        '{"machine": {}, "plans": {"2": {"1": [1]}}, "whole": {"2": {}}}',
        '{"machine": {}, "plans": {"2": {"plain": {"1": [1]}}}, "whole": {"2": {"plain": {}}}}',
    ],
)
def test_another_file_is_no_tuning_file(tmp_path, text):
    (tmp_path / "own.json").write_text(text)
    with pytest.raises(ConfigError, match=r"own\.json(.|\n)*bench fit"):
        read_tuning(tmp_path / "own.json")


def test_a_missing_tuning_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.json cannot be read"):
        read_tuning(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    "level, terms",
    [
        ("host", "host_alpha host_long host_beta gamma"),
        ("network", "host_alpha host_long host_beta net_alpha net_beta gamma"),
    ],
)
def test_fit_explains_measured_constants_only(level, terms):
    lines = described(level, DEFAULT.levels["host"], 2)
    heads = [line for line in lines if " arrays of " in line]
    assert [head.split(" arrays of ")[1].split() for head in heads] == [terms.split()] * 2
    assert all(
        len(line.split()) == 2 + len(terms.split()) for line in lines if line[:14].strip().isdigit()
    )
    assert (
        all(f"{word}: " in lines[-2] for word in ("alpha", "long", "beta", "gamma"))
        and lines[-1] == ""
    )


@pytest.mark.parametrize("operation", TABLES)
def test_on_one_host_auto_is_what_the_default_constants_predict(operation):
    """`chosen` does not ask the model there: this is the proof that it need not."""
    for memory, ranks in product(MEMORY, (1, 2, 3, 4, 7, 16, 64)):
        topology = Topology(("a",) * ranks, "float32", memory == "plain")
        for count in (0, 1, 5, 16, 100, 1 << 10, 1 << 14, 1 << 20, 1 << 24):
            is_small = 4 * count * ranks <= SMALL
            if (is_small or memory == "window") and (operation, ranks) != ("all-gather", 3):
                facts = count, 4, memory, operation
                assert chosen(DEFAULT, topology, *facts) == choose(DEFAULT, topology, *facts)
